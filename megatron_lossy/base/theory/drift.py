"""Drift: the expectation of the squared difference of one weight between replicas (docs/theory.md). NumPy only.

Numbers in parentheses are of *Distributed Training under Packet Loss* (Weintraub, Banner, Orda, 2025).

p is the loss rate of parameters; losses, bursts and r as in :mod:`.ages`. An increment of the owner's weight has the
second moments gamma[k] = E[increment(t) increment(t+k)], about zero and not about the mean; the default is
uncorrelated with variance 1, so that drift comes in units of sigma^2, the mean squared increment of a step. Lags
beyond ``gamma`` count as 0. Increments do not depend on who lost what.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from .ages import persistence, rate_array

UNCORRELATED = (1.0,)


def drift_paper(p: ArrayLike, step: int | None = None) -> np.ndarray:
    """The paper's drift between two workers: 2p/(1+p) (Theorem 3.1), or after ``step`` broadcasts (its proof).

    The paper assumes that a worker that missed a broadcast was up to date before. So a difference never adds up over
    steps lost in a row by one of the two, and the result is too small by the factor 1-p. See :func:`drift_between`.
    """
    p = rate_array(p)
    steady = 2 * p / (1 + p)
    return steady if step is None else steady * (1 - p ** (2 * step))


def drift_to_owner(
    p: ArrayLike, gamma: Sequence[float] = UNCORRELATED, step: int | None = None, burst: float | None = None
) -> np.ndarray:
    """Drift between a receiver and the owner: p/(1-p) for uncorrelated increments.

    The difference is the sum of the last A increments. E of its square grows by G(i) = gamma[0] + 2 (gamma[1] + …
    + gamma[i]) from i to i+1 increments; so it is sum of P(A > i) G(i) = p/(1-r) (gamma[0] + 2 sum of r^k gamma[k]),
    or the sum over i < ``step`` after so many broadcasts.
    """
    p = rate_array(p)
    r = persistence(p, burst)
    if step is None:
        return p / (1 - r) * _discounted(r, gamma)
    return (p[..., None] * r[..., None] ** np.arange(step) * _growth(gamma, step)).sum(axis=-1)


def drift_between(
    p: ArrayLike, gamma: Sequence[float] = UNCORRELATED, step: int | None = None, burst: float | None = None
) -> np.ndarray:
    """Drift between two receivers that lose independently: 2p/(1-p^2) for uncorrelated increments.

    The difference is the sum of the |A-B| increments that only one of them has. P(|A-B| > i) = 2 sum over a of
    P(A = a) P(B > a+i) = 2p r^i (1 - p/(1+r)), then as in :func:`drift_to_owner`. After t = ``step`` broadcasts the
    sum over a ends where a+i = t-1; uncorrelated, that is 2p/(1-p^2) (1-p^t) (1-p^(t+1)). Receivers that lose
    together (``--loss-correlation source``) have no drift.
    """
    p = rate_array(p)
    r = persistence(p, burst)
    if step is None:
        return 2 * p * (1 - p / (1 + r)) / (1 - r) * _discounted(r, gamma)
    i, p, r = np.arange(step), p[..., None], r[..., None]
    tail = 2 * p * r**i * (1 - p + p * r / (1 + r) * (1 - r ** (2 * (step - 1 - i))))
    return (tail * _growth(gamma, step)).sum(axis=-1)


def drift_over_pairs(p: ArrayLike, workers: int, together: bool = False, **options: Any) -> np.ndarray:
    """Mean drift over all pairs of N ``workers`` (at least 2). The owner is in 2 of N pairs.

    2/N of :func:`drift_to_owner` and 1 - 2/N of :func:`drift_between`, which is 0 if receivers lose ``together``;
    ``options`` (``gamma``, ``step``, ``burst``) go to both.
    """
    between = 0.0 if together else drift_between(p, **options)
    return 2 / workers * drift_to_owner(p, **options) + (1 - 2 / workers) * between


def drift_of_ages(tail: ArrayLike, gamma: Sequence[float] = UNCORRELATED) -> tuple[float, float]:
    """Drift to the owner and between two independent receivers, for any ages with P(A > i) = ``tail[i]``.

    Ages beyond the end of ``tail`` count as its length t. So this is also the drift after t broadcasts.
    """
    later = np.asarray(tail, dtype=np.float64)
    steps = len(later)
    exactly = -np.diff(later, prepend=1.0)  # P(A = a) for a < steps; at a = steps nothing can exceed it
    gap = np.array([2 * exactly[: steps - i] @ later[i:] for i in range(steps)])
    growth = _growth(gamma, steps)
    return float(later @ growth), float(gap @ growth)


def ar1(phi: float, lags: int) -> np.ndarray:
    """float64[lags]: gamma of increments x(t) = phi x(t-1) + noise, scaled to variance 1: phi^k.

    SGD with momentum phi on white gradients moves like this. The sum in :func:`drift_to_owner` is then
    (1 + r phi)/(1 - r phi).
    """
    return phi ** np.arange(lags)


def settling_steps(p: float, tolerance: float = 0.01, burst: float | None = None) -> tuple[int, int]:
    """Broadcasts until drift to the owner, and between workers, is within ``tolerance`` (relative) of its limit.

    For uncorrelated increments. The part that is missing after t broadcasts, with x = r^t, is x for the drift to the
    owner, and (x - c x^2)/(1 - c), c = p/(1+r), for the drift between workers. Both are solved for x.
    """
    rate = rate_array(p)
    r = float(persistence(rate, burst))
    if p == 0 or r == 0:
        return int(p > 0), int(p > 0)
    c = p / (1 + r)
    target = tolerance * (1 - c)
    both = tolerance, 2 * target / (1 + np.sqrt(1 - 4 * c * target))
    owner, between = (int(np.ceil(np.log(x) / np.log(r) - 1e-9)) for x in both)
    return owner, between


def second_moments(increments: np.ndarray, lags: int) -> np.ndarray:
    """float64[lags]: gamma of measured ``increments`` [steps, ...], the mean over steps and all other dimensions.

    Raises :class:`ValueError` unless there are more steps than lags.
    """
    steps = len(increments)
    if not 0 < lags < steps:
        raise ValueError(f"lags = {lags}: must be at least 1 and below the {steps} steps")
    flat = increments.reshape(steps, -1).astype(np.float64)
    return np.array([np.mean(flat[: steps - lag] * flat[lag:]) for lag in range(lags)])


def _discounted(r: np.ndarray, gamma: Sequence[float]) -> np.ndarray:
    """gamma[0] + 2 sum over k >= 1 of r^k gamma[k]."""
    first, *later = gamma
    return first + 2 * (r[..., None] ** np.arange(1, len(gamma)) * np.asarray(later, np.float64)).sum(axis=-1)


def _growth(gamma: Sequence[float], count: int) -> np.ndarray:
    """float64[count]: E of the squared sum of i+1 increments minus E of the squared sum of i."""
    terms = np.zeros(count)
    known = np.asarray(gamma, dtype=np.float64)[:count]
    terms[: len(known)] = known
    return 2 * np.cumsum(terms) - terms[:1]
