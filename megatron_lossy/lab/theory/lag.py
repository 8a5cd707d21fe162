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

from dataclasses import dataclass

import numpy as np

from ...base.theory import Lead, lead

_GRID = 4096


@dataclass(frozen=True)
class Lag:
    """The lag filter: a ``share`` s of receivers misses an update; ``again`` q: the chance of another miss."""

    share: float = 0.0
    again: float = 0.0

    @classmethod
    def of(cls, p: float, burst: float | None = None) -> Lag:
        """Return the lag of receivers that lose ``p``, in bursts of mean length ``burst``, which is at least p/(1-p)."""
        return cls(p, p if burst is None else 1 - 1 / burst)

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
        if (real := _open_loop(high, beta1, lag, sent, nesterov).real) < 0:
            crossings.append(-1 / real)
    return float(min(crossings))


def _open_loop(angle: np.ndarray, beta1: float, lag: Lag, sent: Lead, nesterov: bool) -> np.ndarray:
    x = np.exp(-1j * angle)
    moment = (1 - beta1) / (1 - beta1 * x) * ((1 + beta1 - beta1 * x) if nesterov else 1)
    late = (1 - lag.share - (lag.again - lag.share) * x) / (1 - lag.again * x)
    ahead = 1 + sent.c * (1 - x) / (1 - sent.r * x)
    return x / (1 - x) * moment * late * ahead
