"""Ages: how many updates a replica of a shard has missed; 0 is up to date (docs/theory.md). NumPy only.

Losses of parameters (``--p-param``) are independent from step to step, or come in bursts of mean length B steps
(Gilbert-Elliott with everything lost in the bad state, one advance of the chain per step: ``--loss-unit shard``).
Both have

    P(A > i) = p r^i,    r = p without bursts,    r = 1 - 1/B with them,

since the last i + 1 broadcasts must all be lost. Equal replicas at step 0 have age min(A, t) after t broadcasts, if
the chain of losses is stationary, as it is here. ``p`` may be an array; results have its shape. Rates outside [0, 1)
raise ``ValueError``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

#: The bound for terms that an infinite sum leaves out.
_REMAINDER = 1e-18


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


def age_exceeds(p: ArrayLike, age: ArrayLike, burst: float | None = None) -> np.ndarray:
    """P(A > age) = p r^age in the steady state; ``age`` >= 0 broadcasts against ``p``."""
    p = rate_array(p)
    return p * persistence(p, burst) ** np.asarray(age)


def age_mean(p: ArrayLike, burst: float | None = None) -> np.ndarray:
    """E A = sum of P(A > i) = p/(1-r): p/(1-p), or p B with bursts."""
    p = rate_array(p)
    return p / (1 - persistence(p, burst))


def age_variance(p: ArrayLike, burst: float | None = None) -> np.ndarray:
    """E A^2 = sum of (2i+1) P(A > i) = p (1+r)/(1-r)^2, so Var A = p (1+r-p)/(1-r)^2: p/(1-p)^2 without bursts."""
    p = rate_array(p)
    r = persistence(p, burst)
    return p * (1 + r - p) / (1 - r) ** 2


def age_max(p: ArrayLike, links: int, burst: float | None = None) -> np.ndarray:
    """Expected largest age among ``links`` independent links: sum over i of 1 - (1 - P(A > i))^links.

    Each unit of a link counts as one. It grows like log(links)/log(1/r); N workers of u units have N (N-1) u of them.
    """
    p = rate_array(p)
    largest = float(np.max(persistence(p, burst), initial=0.0))
    terms = _terms(largest, _REMAINDER / max(links, 1))
    return _any_exceeds(age_exceeds(p[..., None], np.arange(terms), burst), links).sum(axis=-1)


def burst_tail(transitions: Sequence[float], steps: int, units: int = 1) -> np.ndarray:
    """float64[steps]: P(A > i) for the four parameters of ``--ge-param``, i < ``steps``.

    ``transitions``: P(good to bad), P(bad to good), loss when good, loss when bad. The chain advances ``units``
    times per step. With its matrix T over a step, its stationary distribution s and the losses L = diag(good, bad),
    the last i + 1 broadcasts are all lost with probability s L (T L)^i 1.
    """
    to_bad, to_good, *losses = transitions
    both = to_bad + to_good
    stationary = np.array([to_good, to_bad]) / both if both else np.array([1.0, 0.0])
    chain = np.linalg.matrix_power(np.array([[1 - to_bad, to_bad], [to_good, 1 - to_good]]), units)
    lost = stationary * losses
    tail = np.empty(steps)
    for i in range(steps):
        tail[i] = lost.sum()
        lost = lost @ chain * losses
    return tail


def _terms(r: float, remainder: float) -> int:
    return 1 if r <= 0 else int(np.ceil(np.log(remainder) / np.log(r))) + 1


def _any_exceeds(tail: np.ndarray, links: int) -> np.ndarray:
    return -np.expm1(links * np.log1p(-tail))
