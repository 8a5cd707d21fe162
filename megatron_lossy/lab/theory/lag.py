"""The lag of replicas as a filter, its inverse, and the largest learning rate that it leaves stable. NumPy only.

Averaged over receivers and draws, a worker's copy of a remote unit is the owner's trajectory passed through

    S(x) = sum of P(A = a) x^a = (1 - s - (q - s) x) / (1 - q x),    P(A > i) = s q^i,

with x the delay by one update, A the age (how many updates were missed), ``s`` the share of receivers that miss an update, and ``q``
the probability that another miss follows. Independent losses have s = q = p; bursts of mean length B have s = p and q =
1 - 1/B. If only a share f of receivers has lossy links (``--lossy-links inter-node``, or the owner itself counted in),
s = f p. The mean lag is E A = s / (1 - q).

The owner undoes it by sending V = C(x) W instead of its weights W:

    C(x) = 1 + c (1 - x) / (1 - r x),    c = s / (1 - s),    r = (q - s) / (1 - s) = 1 - c / E A,

since (1 + c) (1 - s) = 1 and (r + c) (1 - s) = q make C(x) = (1 - q x) / ((1 - s) (1 - r x)) = 1 / S(x). So the mean
over receivers is W, for any trajectory. In the time domain V = W + E with E(t) = c (W(t) - W(t-1)) + r E(t-1).
"""

from __future__ import annotations

import cmath
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ...base.theory import Lead, lead

_GRID = 20_000


def rate_array(p: ArrayLike) -> np.ndarray:
    """Return ``p`` as float64; raises :class:`ValueError` outside [0, 1)."""
    p = np.asarray(p, dtype=np.float64)
    if not ((p >= 0) & (p < 1)).all():
        raise ValueError(f"p = {p}: must be in [0, 1)")
    return p


@dataclass(frozen=True)
class Lag:
    """The lag filter: a ``share`` s of receivers misses an update; ``again`` q: the chance of another miss."""

    share: float = 0.0
    again: float = 0.0

    @classmethod
    def of(cls, p: float, burst: float | None = None, lossy: float = 1.0) -> Lag:
        """Return the lag of receivers: the share ``lossy`` of them loses ``p``, in bursts of mean length ``burst``.

        Raise ``ValueError`` for p outside [0, 1), a burst below 1 or p/(1-p), or ``lossy`` outside [0, 1].
        """
        if not 0 <= lossy <= 1:
            raise ValueError(f"lossy = {lossy}: must be in [0, 1]")
        p = float(rate_array(p))
        if burst is None:
            return cls(lossy * p, p)
        if not (burst >= 1 and p / (1 - p) <= burst * (1 + 1e-12)):
            raise ValueError(f"burst = {burst}: must be at least 1 and p/(1-p), for p = {p}")
        return cls(lossy * p, 1 - 1 / burst)

    @property
    def mean(self) -> float:
        """E A = s / (1 - q): the mean number of updates that receivers are late."""
        return self.share / (1 - self.again)

    @property
    def lead(self) -> Lead:
        """The lead that undoes this lag, exactly unless its r is cut off."""
        return lead(self.share, self.mean)


def mean_lag(lag: Lag, sent: Lead = Lead()) -> float:
    """Return the updates by which the mean of receivers lags an owner that sends with a lead: E A - c / (1 - r).

    E A is minus the slope of S(x) at x = 1, and c / (1 - r) the slope of C(x) there. The lag is 0 for :attr:`Lag.lead`.
    """
    return lag.mean - sent.c / (1 - sent.r)


def stability_limit(beta1: float, lag: Lag = Lag(), sent: Lead = Lead(), nesterov: bool = False) -> float:
    """Return the largest stable (learning rate x eigenvalue of the preconditioned Hessian) of Adam with first moment
    ``beta1``.

    Along an eigenvector the weights follow W(t+1) = W(t) - k F(x) S(x) C(x) W(t). F(x) = (1 - b) / (1 - b x) is the
    first moment, or (1 - b) (1 + b - b x) / (1 - b x) with ``nesterov`` (NAdam). From k = 0 on, stability ends at the
    smallest k with k x/(1-x) F S C = -1 somewhere on the unit circle. Without loss it is 2 (1 + b) / (1 - b). The
    lag-free case follows Cohen et al., "Adaptive Gradient Methods at the Edge of Stability" (arXiv:2207.14484).
    """
    if not 0 <= beta1 < 1:
        raise ValueError(f"beta1 = {beta1}: must be in [0, 1)")
    # Angles are denser towards 0: there a lag of many updates turns the phase.
    angle = np.pi * np.linspace(0, 1, _GRID + 1)[1:] ** 2
    gain = _open_loop(angle, beta1, lag, sent, nesterov)
    crossings = [1 / -gain[-1].real] if gain[-1].real < 0 else []
    sign = np.sign(gain.imag[:-1])  # at pi the imaginary part is 0
    for k in np.flatnonzero(sign[:-1] * sign[1:] < 0):
        low, high = angle[k], angle[k + 1]
        for _ in range(60):
            middle = (low + high) / 2
            same = np.sign(_open_loop(middle, beta1, lag, sent, nesterov).imag) == sign[k]
            low, high = (middle, high) if same else (low, middle)
        real = _open_loop(high, beta1, lag, sent, nesterov).real
        if real < 0:
            crossings.append(-1 / real)
    return float(min(crossings))


def _open_loop(angle: np.ndarray, beta1: float, lag: Lag, sent: Lead, nesterov: bool) -> np.ndarray:
    x = np.exp(-1j * angle)
    moment = (1 - beta1) / (1 - beta1 * x) * ((1 + beta1 - beta1 * x) if nesterov else 1)
    late = (1 - lag.share - (lag.again - lag.share) * x) / (1 - lag.again * x)
    ahead = 1 + sent.c * (1 - x) / (1 - sent.r * x)
    return x / (1 - x) * moment * late * ahead


# --- gradients of old weights: the largest stable learning rate ------------------------------------------------------
# In an asynchronous pipeline of P stages, stage s follows gradients that are d = P - 1 - s updates old. Along a direction
# of curvature h the weights of a stage then follow, with momentum mu (torch.optim.SGD's, which adds gradients up),
#
#     b(k) = mu b(k-1) + h x(k-d),    x(k+1) = x(k) - lr b(k),                  heavy ball
#                                     x(k+1) = x(k) - lr (h x(k-d) + mu b(k)),  Nesterov
#
# with a = lr h as the only number besides mu and d. A mode leaves the unit circle at a z = exp(iw) for which
#
#     a = -z^d (z - 1) (z - mu) / N(z),    N = z for heavy ball,    N = (1 + mu) z - mu for Nesterov,
#
# is real and positive; the smallest such a is the bound. For heavy ball the condition reads tan(d w) = (1 - mu)/(1 + mu)
# cot(w/2), and a = 2 sin(w/2) sqrt((1 + mu)^2 sin(w/2)^2 + (1 - mu)^2 cos(w/2)^2). Without momentum w = pi/(2d + 1) and a
# = 2 sin(w/2), the bound of :func:`.averaging.stability_bound`.


_GRID = 4096


def delayed_step_bound(delay: int, momentum: float = 0.0, nesterov: bool = False) -> float:
    """Return the least product of learning rate and curvature that diverges with gradients ``delay`` updates old.

    Raise ``ValueError`` for a negative delay or a momentum outside [0, 1).
    """
    if delay < 0:
        raise ValueError(f"delay = {delay}: must be at least 0")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum = {momentum}: must be in [0, 1)")

    def value(angle: float) -> complex:
        z = cmath.exp(1j * angle)
        numerator = (1 + momentum) * z - momentum if nesterov else z
        return -(z**delay) * (z - 1) * (z - momentum) / numerator

    found = [value(math.pi).real]
    angles = [math.pi * k / (_GRID * (delay + 1)) for k in range(1, _GRID * (delay + 1))]
    for low, high in itertools.pairwise(angles):
        if value(low).imag < 0 <= value(high).imag or value(high).imag < 0 <= value(low).imag:
            found.append(value(_root(value, low, high)).real)
    return min(bound for bound in found if bound > 0)


def _root(value: Callable[[float], complex], low: float, high: float) -> float:
    """Return the place between ``low`` and ``high`` at which the imaginary part changes its sign."""
    below = value(low).imag < 0
    for _ in range(60):
        middle = (low + high) / 2
        if (value(middle).imag < 0) == below:
            low = middle
        else:
            high = middle
    return (low + high) / 2
