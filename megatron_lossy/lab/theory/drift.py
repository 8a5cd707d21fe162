"""Ages of replicas, and drift: the expectation of the squared difference of one weight between two (docs/theory.md). NumPy only.

Age A: how many updates a replica of a shard has missed; 0 is up to date. p is the loss rate of parameters. Losses are independent
from step to step, or come in bursts of mean length B steps (Gilbert-Elliott with everything lost in the bad state, one advance of
the chain per step: ``--loss-unit shard``). Both have

    P(A > i) = p r^i,    r = p without bursts,    r = 1 - 1/B with them,

since the last i + 1 broadcasts must all be lost. Equal replicas at step 0 have age min(A, t) after t broadcasts, if the chain of
losses is stationary, as it is here. ``p`` may be an array; results have its shape. Rates outside [0, 1) raise ``ValueError``.

An increment of the owner's weight has the second moments gamma[k] = E[increment(t) increment(t+k)], about zero and not about the
mean; the default is uncorrelated with variance 1, so that drift comes in units of sigma^2, the mean squared increment of a step.
Lags beyond ``gamma`` count as 0. Increments do not depend on who lost what.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from ...base.theory import growth_of

UNCORRELATED = (1.0,)


def rate_array(p: ArrayLike) -> np.ndarray:
    """``p`` as float64; raises :class:`ValueError` outside [0, 1)."""
    p = np.asarray(p, dtype=np.float64)
    if not ((p >= 0) & (p < 1)).all():
        raise ValueError(f"p = {p}: must be in [0, 1)")
    return p


def persistence(p: np.ndarray, burst: float | None) -> np.ndarray:
    """r: the probability that a lost broadcast is followed by another one."""
    if burst is None:
        return p
    if not (burst >= 1 and (p / (1 - p) <= burst * (1 + 1e-12)).all()):
        raise ValueError(f"burst = {burst}: must be at least 1 and p/(1-p), for p = {p}")
    return np.full_like(p, 1 - 1 / burst)


def age_mean(p: ArrayLike, burst: float | None = None) -> np.ndarray:
    """E A = sum of P(A > i) = p/(1-r): p/(1-p), or p B with bursts."""
    p = rate_array(p)
    return p / (1 - persistence(p, burst))


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
    return (p[..., None] * r[..., None] ** np.arange(step) * growth_of(gamma, step)).sum(axis=-1)


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
    return (tail * growth_of(gamma, step)).sum(axis=-1)


def _discounted(r: np.ndarray, gamma: Sequence[float]) -> np.ndarray:
    """gamma[0] + 2 sum over k >= 1 of r^k gamma[k]."""
    first, *later = gamma
    return first + 2 * (r[..., None] ** np.arange(1, len(gamma)) * np.asarray(later, np.float64)).sum(axis=-1)
