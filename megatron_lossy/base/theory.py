"""Closed forms that runs use: of ages and drift, of leads, of averaging between islands, and of rounding (docs/theory.md). NumPy only.

:mod:`megatron_lossy.lab.theory` has those of the lab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

# --- ages of replicas and their drift --------------------------------------------------------------------------------


def burst_tail(transitions: Sequence[float], steps: int, units: int = 1) -> np.ndarray:
    """Return float64[steps]: P(A > i) for the four parameters of ``gilbert-elliott:PGB,PBG,LG,LB``, i < ``steps``.

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


def drift_of_ages(tail: ArrayLike) -> tuple[float, float]:
    """Return drift to the owner and between two independent receivers, for any ages with P(A > i) = ``tail[i]``.

    In units of the mean square of an increment, of which none is like another. Ages beyond the end of ``tail`` count as its
    length t. So this is also the drift after t broadcasts.
    """
    later = np.asarray(tail, dtype=np.float64)
    exactly = -np.diff(later, prepend=1.0)  # P(A = a) for a < t; at a = t nothing can exceed it
    apart = np.array([2 * exactly[: len(later) - i] @ later[i:] for i in range(len(later))])
    every = np.ones(len(later))
    return float(later @ every), float(apart @ every)


# --- leads -----------------------------------------------------------------------------------------------------------
# An owner undoes the lag of its receivers by sending V = W + E with E(t) = c (W(t) - W(t-1)) + r E(t-1), where a share s of
# receivers misses an update, E A is their mean lag, c = s / (1 - s), and r = 1 - c / E A: the mean over receivers is then W, for
# any trajectory (megatron_lossy.lab.theory.lag).

#: r of a lead is cut off here: with r near 1 the lead would remember the whole run.
HIGHEST_R = 0.95


class Lead(NamedTuple):
    """The owner's addition to its weights: E(t) = ``c`` (W(t) - W(t-1)) + ``r`` E(t-1). Nothing by default."""

    c: float = 0.0
    r: float = 0.0


def lead(share: float, mean_age: float) -> Lead:
    """Return the lead for receivers that miss a share ``share`` of updates, by ``mean_age`` updates on average.

    Only these two are needed, and receivers can count them. r is cut off to [0, 0.95]: bursts of more than about 20
    updates are then undone in part, and losses that avoid each other a little more than undone.
    """
    if not share:
        return Lead()
    c = share / (1 - share)
    return Lead(c, min(max(1 - c / mean_age, 0.0), HIGHEST_R))


# --- averaging of M islands (*AsyncMesh*, sections 2.3 and 3) --------------------------------------------------------
# An element is exchanged once in n rounds of K iterations (``cyclic``, ``partition``), or with probability f in each
# (``bernoulli``), and the mean is used tau iterations later. q = floor(tau / (n K)) later exchanges of the element are then under
# way. The correction of the delay is a feedback of gain g (alpha of ``mixing``, lambda of ``ema``). Per visit the deviation of an
# island from the mean follows x(k+1) = x(k) - g x(k-q), if an element's gaps are equal.


def stability_bound(overlap: int) -> float:
    """Return the gain below which deviations die out: 2 sin(pi / (2 (2q + 1))), ``overlap`` q: 2, 1, 0.618, ...

    x(k+1) = x(k) - g x(k-q) leaves the unit circle at z = exp(i a) with z^q (z - 1) = -g: |z - 1| = 2 sin(a/2) = g and
    q a + (pi + a)/2 = pi, so a = pi / (2q + 1) (Levin and May, 1976). The proof of the paper's theorem 4 takes the
    noise since the exchange began as independent of the deviation at that time, and so finds every gain below 2 stable.
    """
    return 2 * math.sin(math.pi / (2 * (2 * overlap + 1)))


def critical_gain(overlap: int) -> float:
    """Return the largest gain without oscillation, q^q / (q + 1)^(q + 1): 1, 1/4, 4/27, ...; near it deviations die out
    fastest.

    z^(q+1) - z^q + g = 0 has its double real root at z = q / (q + 1), and this is g at that root.
    """
    return overlap**overlap / (overlap + 1) ** (overlap + 1)


def stability_bound_drawn(fraction: float, delay: int) -> float:
    """Return the same bound for ``bernoulli``, for the mean square of deviations.

    ``delay``: floor(tau/K), exchanges of any elements. x(t+1) = x(t) - g b x(t-tau) per exchange, with b = 1 with
    probability f. b is independent of x(t-tau), so that this is the mean's recursion x(t+1) = x(t) - g f x(t-tau) with
    noise of variance g^2 f (1-f) E x(t-tau)^2. The squared impulse response of that recursion adds up to (1 + sin c)/(2
    sin a cos c) with 2 sin(a/2) = g f and c = a (tau + 1/2): autocovariances follow r(k) = r(k-1) - g f r(tau+1-k),
    which cos(ak) and sin(ak) solve. Noise dies out if it begets less than itself: tan(a/2) tan(pi/4 + c/2) < f/(1-f).
    With f = 1 this is the bound of fixed gaps; without delay it is 2.
    """
    low, high = 0.0, math.pi / (2 * delay + 1)  # c is pi/2 at ``high``; beyond it the mean diverges
    for _ in range(60):
        a = (low + high) / 2
        begets = (1 - fraction) * math.tan(a / 2) * math.tan(math.pi / 4 + a * (delay + 0.5) / 2)
        low, high = (a, high) if begets < fraction else (low, a)
    return 2 * math.sin(low / 2) / fraction


def critical_gain_drawn(fraction: float, delay: int) -> float:
    """Return :func:`critical_gain` of the mean with ``bernoulli``, at most 1. ``delay``: as for its stability bound."""
    return min(1.0, critical_gain(delay) / fraction)


def bytes_sent(elements: int, islands: int, itemsize: float = 4, receivers: int | None = None) -> float:
    """Return the bytes that an island sends in one exchange of ``elements``, to owners and back, without its own part.

    ``receivers``: of means, if some of these send nothing; default ``islands``.
    """
    others = (islands - 1) + ((receivers or islands) - 1)
    return others / islands * elements * itemsize


# --- rounding --------------------------------------------------------------------------------------------------------


def as_loss(omega: ArrayLike) -> np.ndarray:
    """Return the loss rate with the cost of a relative error ``omega``: (p + omega) / (1 - p) of S^2 / N is lost."""
    omega = np.asarray(omega, dtype=np.float64)
    return omega / (1 + omega)
