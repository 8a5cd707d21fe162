"""Closed forms for drift, ages and recovery rules (docs/theory.md). NumPy only.

Numbers in parentheses are of *Distributed Training under Packet Loss* (Weintraub, Banner, Orda, 2025).

Notation. ``p`` is the loss rate of one phase: that of parameters for drift and ages (``--p-param``), that of gradients
for recovery rules (``--p-grad``). A is the age of a replica of a shard: how many updates it has missed; 0 is up to
date. Losses are independent from step to step, or come in bursts of mean length B steps (Gilbert-Elliott with
everything lost in the bad state, one advance of the chain per step: ``--loss-unit shard``). Both have

    P(A > i) = p r^i,    r = p without bursts,    r = 1 - 1/B with them,

since the last i + 1 broadcasts must all be lost. Equal replicas at step 0 have age min(A, t) after t broadcasts, if the
chain of losses is stationary, as it is here. ``p`` may be an array; results have its shape. Rates outside [0, 1) raise
``ValueError``.

Drift is the expectation of the squared difference of one weight. An increment of the owner's weight has the second
moments gamma[k] = E[increment(t) increment(t+k)], about zero and not about the mean; the default is uncorrelated with
variance 1, so that drift comes in units of sigma^2. Lags beyond ``gamma`` count as 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

UNCORRELATED = (1.0,)

#: What is left out of an infinite sum.
_REMAINDER = 1e-18


def _rate(p: ArrayLike) -> np.ndarray:
    p = np.asarray(p, dtype=np.float64)
    if not ((p >= 0) & (p < 1)).all():
        raise ValueError(f"p = {p}: must be in [0, 1)")
    return p


def _persistence(p: np.ndarray, burst: float | None) -> np.ndarray:
    """r: the probability that a lost broadcast is followed by another one."""
    if burst is None:
        return p
    if not (burst >= 1 and (p / (1 - p) <= burst * (1 + 1e-12)).all()):
        raise ValueError(f"burst = {burst}: must be at least 1 and p/(1-p), for p = {p}")
    return np.full_like(p, 1 - 1 / burst)


# --- Ages ----------------------------------------------------------------------------------------------------------


def age_exceeds(p: ArrayLike, age: ArrayLike, burst: float | None = None) -> np.ndarray:
    """P(A > age) = p r^age in the steady state; ``age`` >= 0 broadcasts against ``p``."""
    p = _rate(p)
    return p * _persistence(p, burst) ** np.asarray(age)


def age_mean(p: ArrayLike, burst: float | None = None) -> np.ndarray:
    """E A = sum of P(A > i) = p/(1-r): p/(1-p), or p B with bursts."""
    p = _rate(p)
    return p / (1 - _persistence(p, burst))


def age_variance(p: ArrayLike, burst: float | None = None) -> np.ndarray:
    """E A^2 = sum of (2i+1) P(A > i) = p (1+r)/(1-r)^2, so Var A = p (1+r-p)/(1-r)^2: p/(1-p)^2 without bursts."""
    p = _rate(p)
    r = _persistence(p, burst)
    return p * (1 + r - p) / (1 - r) ** 2


def age_max(p: ArrayLike, links: int, burst: float | None = None) -> np.ndarray:
    """Expected largest age among ``links`` independent links: sum over i of 1 - (1 - P(A > i))^links."""
    p = _rate(p)
    largest = float(np.max(_persistence(p, burst), initial=0.0))
    terms = _terms(largest, _REMAINDER / max(links, 1))
    return _any_exceeds(age_exceeds(p[..., None], np.arange(terms), burst), links).sum(axis=-1)


def burst_tail(transitions: Sequence[float], steps: int, units: int = 1) -> np.ndarray:
    """float64[steps]: P(A > i) for the four parameters of ``--ge-param``, i < ``steps``.

    ``transitions``: P(good to bad), P(bad to good), loss when good, loss when bad. The chain advances ``units`` times
    per step. With its matrix T over a step, its stationary distribution s and the losses L = diag(good, bad), the last
    i + 1 broadcasts are all lost with probability s L (T L)^i 1.
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


# --- Drift ---------------------------------------------------------------------------------------------------------


def drift_paper(p: ArrayLike, step: int | None = None) -> np.ndarray:
    """The paper's drift between two workers: 2p/(1+p) (Theorem 3.1), or after ``step`` broadcasts (its proof).

    It takes a worker that missed a broadcast to have been up to date before, so that a difference never adds up over
    steps lost in a row by one of the two: too small by the factor 1-p. See :func:`drift_between`.
    """
    p = _rate(p)
    steady = 2 * p / (1 + p)
    return steady if step is None else steady * (1 - p ** (2 * step))


def drift_to_owner(
    p: ArrayLike, gamma: Sequence[float] = UNCORRELATED, step: int | None = None, burst: float | None = None
) -> np.ndarray:
    """Drift between a receiver and the owner: p/(1-p) for uncorrelated increments; after ``step`` broadcasts if given.

    The difference is the sum of the last A increments. E of its square grows by G(i) = gamma[0] + 2 (gamma[1] + … +
    gamma[i]) from i to i+1 increments; so it is sum of P(A > i) G(i) = p/(1-r) (gamma[0] + 2 sum of r^k gamma[k]).
    """
    p = _rate(p)
    r = _persistence(p, burst)
    if step is None:
        return p / (1 - r) * _discounted(r, gamma)
    return (p[..., None] * r[..., None] ** np.arange(step) * _growth(gamma, step)).sum(axis=-1)


def drift_between(
    p: ArrayLike, gamma: Sequence[float] = UNCORRELATED, step: int | None = None, burst: float | None = None
) -> np.ndarray:
    """Drift between two receivers that lose independently: 2p/(1-p^2) for uncorrelated increments.

    The difference is the sum of the |A-B| increments that only one of them has. P(|A-B| > i) = 2 sum over a of
    P(A = a) P(B > a+i) = 2p r^i (1 - p/(1+r)), then as in :func:`drift_to_owner`; after ``step`` broadcasts the sum
    over a ends where a+i = step-1. Receivers that lose together (``--loss-correlation source``) have no drift.
    """
    p = _rate(p)
    r = _persistence(p, burst)
    if step is None:
        return 2 * p * (1 - p / (1 + r)) / (1 - r) * _discounted(r, gamma)
    i, p, r = np.arange(step), p[..., None], r[..., None]
    tail = 2 * p * r**i * (1 - p + p * r / (1 + r) * (1 - r ** (2 * (step - 1 - i))))
    return (tail * _growth(gamma, step)).sum(axis=-1)


def drift_over_pairs(p: ArrayLike, workers: int, together: bool = False, **options) -> np.ndarray:
    """Mean drift over all pairs of N ``workers`` (at least 2), the owner among them: in 2 of N pairs.

    2/N of :func:`drift_to_owner` and 1 - 2/N of :func:`drift_between`, which is 0 if receivers lose ``together``;
    ``options`` (``gamma``, ``step``, ``burst``) go to both.
    """
    between = 0.0 if together else drift_between(p, **options)
    return 2 / workers * drift_to_owner(p, **options) + (1 - 2 / workers) * between


def drift_of_ages(tail: Sequence[float], gamma: Sequence[float] = UNCORRELATED) -> tuple[float, float]:
    """Drift to the owner and between two independent receivers, for any ages with P(A > i) = ``tail[i]``.

    Ages beyond the end of ``tail`` count as its length t, so that this is also the drift after t broadcasts.
    """
    tail = np.asarray(tail, dtype=np.float64)
    steps = len(tail)
    exactly = -np.diff(tail, prepend=1.0)  # P(A = a) for a < steps; at a = steps nothing can exceed it
    gap = np.array([2 * exactly[: steps - i] @ tail[i:] for i in range(steps)])
    growth = _growth(gamma, steps)
    return float(tail @ growth), float(gap @ growth)


def ar1(phi: float, lags: int) -> np.ndarray:
    """float64[lags]: gamma of increments x(t) = phi x(t-1) + noise with variance 1.

    SGD with momentum phi on white gradients moves like this. The sum in :func:`drift_to_owner` is then
    (1 + r phi)/(1 - r phi).
    """
    return phi ** np.arange(lags)


def settling_steps(p: float, tolerance: float = 0.01, burst: float | None = None) -> tuple[int, int]:
    """Broadcasts until drift to the owner, and between workers, is within ``tolerance`` (relative) of its limit.

    Uncorrelated increments. What is missing after t, with x = r^t: x of the drift to the owner, and of that between
    workers (x - c x^2)/(1 - c), c = p/(1+r); solved for x.
    """
    rate = _rate(p)
    r = float(_persistence(rate, burst))
    if p == 0 or r == 0:
        return int(p > 0), int(p > 0)
    c = p / (1 + r)
    target = tolerance * (1 - c)
    both = tolerance, 2 * target / (1 + np.sqrt(1 - 4 * c * target))
    owner, between = (int(np.ceil(np.log(x) / np.log(r) - 1e-9)) for x in both)
    return owner, between


def _discounted(r: np.ndarray, gamma: Sequence[float]) -> np.ndarray:
    """gamma[0] + 2 sum over k >= 1 of r^k gamma[k]."""
    gamma = np.asarray(gamma, dtype=np.float64)
    return gamma[0] + 2 * (r[..., None] ** np.arange(1, len(gamma)) * gamma[1:]).sum(axis=-1)


def _growth(gamma: Sequence[float], count: int) -> np.ndarray:
    """float64[count]: E of the squared sum of i+1 increments less that of i."""
    terms = np.zeros(count)
    known = np.asarray(gamma, dtype=np.float64)[:count]
    terms[: len(known)] = known
    return 2 * np.cumsum(terms) - terms[:1]


# --- Recovery of gradients -----------------------------------------------------------------------------------------


def survivors(p: ArrayLike, workers: int, lossy_self: bool = False) -> np.ndarray:
    """float64[..., workers + 1]: P(K = k) for K of ``workers`` gradients at the owner, its own among them.

    K = 1 + Binomial(N-1, 1-p); Binomial(N, 1-p) with ``--lossy-self``. Mean 1 + (N-1)(1-p) and N(1-p).
    """
    p = _rate(p)
    if lossy_self:
        return _binomial(workers, p)
    return np.concatenate([np.zeros((*p.shape, 1)), _binomial(workers - 1, p)], axis=-1)


def no_survivor(p: ArrayLike, workers: int, lossy_self: bool = False) -> np.ndarray:
    """Probability that no gradient reaches the owner: p^N with ``--lossy-self``, else 0."""
    return _rate(p) ** workers if lossy_self else np.zeros_like(_rate(p))


@dataclass(frozen=True)
class Weights:
    """First and second moments over the losses of the weights w that N ``workers``' gradients get at an owner.

    The owner's estimate is the sum of w g. ``own``: E w of the owner's gradient; ``other``: of each other one.
    ``own_own``, ``own_other``, ``other_other``: E of the products; ``same_other``: E of the square of another's.
    Arrays of the shape of p. Losses are exchangeable over the others, so that this is all there is to know.
    """

    workers: int
    own: np.ndarray
    other: np.ndarray
    own_own: np.ndarray
    own_other: np.ndarray
    same_other: np.ndarray
    other_other: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """E of the sum of weights; the factor of the expectation if all gradients have the same one."""
        return self.own + (self.workers - 1) * self.other

    @property
    def noise(self) -> np.ndarray:
        """E of the sum of squared weights: variance of the estimate over that of one of i.i.d. gradients, mean 0.

        Without loss 1/N. With mean m, add m^2 times :attr:`total_variance`.
        """
        return self.own_own + (self.workers - 1) * self.same_other

    @property
    def total_variance(self) -> np.ndarray:
        """Variance of the sum of weights."""
        others = self.workers - 1
        pairs = 2 * others * self.own_other + others * (others - 1) * self.other_other
        return self.noise + pairs - self.total**2

    def mean(self, gradients: ArrayLike) -> np.ndarray:
        """Expectation of the estimate over losses for fixed ``gradients`` [N], the owner's first."""
        gradients = np.asarray(gradients, dtype=np.float64)
        return self.own * gradients[0] + self.other * gradients[1:].sum()

    def variance(self, gradients: ArrayLike) -> np.ndarray:
        """Variance of the estimate over losses for fixed ``gradients`` [N], the owner's first."""
        gradients = np.asarray(gradients, dtype=np.float64)
        own, others = gradients[0], gradients[1:].sum()
        squares = (gradients[1:] ** 2).sum()
        second = (
            self.own_own * own**2
            + 2 * self.own_other * own * others
            + self.same_other * squares
            + self.other_other * (others**2 - squares)
        )
        return second - self.mean(gradients) ** 2


def weights(
    rule: str, p: ArrayLike, workers: int, lossy_self: bool = False, given_survivor: bool = False,
    step: int | None = None,
) -> Weights:
    """Weights that ``--grad-recovery rule`` gives, for losses of rate ``p`` that are independent over senders.

    One step's weights are the same under bursts and under ``--loss-correlation source``: the rate alone matters.
    ``given_survivor``: with ``--lossy-self``, on condition that something arrived (else the estimate is 0).
    ``step``: for ``previous``, after so many exchanges; the steady state by default, when all weights are 1/N, and
    its gradients are old (:func:`previous_staleness`).

    Derived from the number of survivors: given K, each sender is among them with the same probability, and each pair.
    """
    p = _rate(p)
    others, unit = workers - 1, np.ones_like(p)
    remote = np.arange(workers)  # number of remote survivors
    if rule in ("zero", "previous"):
        # previous: with gradients constant in time only those never received are missing.
        lost = p if rule == "zero" else p ** (np.inf if step is None else step)
        own, other = (1 - lost if lossy_self else unit) / workers, (1 - lost) / workers
        moments = (own, other, own / workers, own * other, other / workers, other**2)
    elif rule == "renormalize" and lossy_self:
        chance = survivors(p, workers, True)[..., 1:]
        count = remote + 1
        alike = (chance / count).sum(axis=-1) / workers
        pair = (chance * _pair_share(count, workers) / count**2).sum(axis=-1)
        mean = (1 - p**workers) / workers
        moments = (mean, mean, alike, pair, alike, pair)
    elif rule == "renormalize":
        # Own weight E 1/K = (1 - p^N) / (N (1-p)), from C(N-1, m)/(m+1) = C(N, m+1)/N.
        chance = _binomial(others, p)
        own = (1 - p**workers) / (workers * (1 - p))
        square = chance / (remote + 1) ** 2
        share = (square * remote).sum(axis=-1) / max(others, 1)
        pair = (square * _pair_share(remote, others)).sum(axis=-1)
        moments = (own, (1 - own) / max(others, 1), square.sum(axis=-1), share, share, pair)
    elif rule == "renormalize-remote" and not lossy_self:
        chance = _binomial(others, p)
        alone = chance[..., 0]
        square = (others / workers) ** 2 * chance[..., 1:] / remote[1:] ** 2
        some = (1 - alone) / workers
        same = (square * remote[1:]).sum(axis=-1) / max(others, 1)
        pair = (square * _pair_share(remote[1:], others)).sum(axis=-1)
        moments = (some + alone, some, some / workers + alone, some / workers, same, pair)
    else:
        raise ValueError(f"rule = {rule}, lossy_self = {lossy_self}: no such recovery rule")
    if given_survivor:
        moments = tuple(moment / (1 - no_survivor(p, workers, lossy_self)) for moment in moments)
    return Weights(workers, *moments)


def previous_staleness(p: ArrayLike, rho: Sequence[float]) -> np.ndarray:
    """``previous``: mean squared error of one sender's substituted gradient against its current one, over variance.

    E (g(t-A) - g(t))^2 = 2 (1 - E rho(A)), with autocorrelation ``rho`` (lags from 0, rho[0] = 1; 0 beyond) and A as
    for parameters. The estimate's error against the plain mean of the current gradients is (N-1)/N^2 of this, while
    its variance stays 1/N: what is substituted is as noisy as what was lost.
    """
    p = _rate(p)
    rho = np.asarray(rho, dtype=np.float64)
    return 2 * (1 - (1 - p) * (p[..., None] ** np.arange(len(rho)) * rho).sum(axis=-1))


def previous_long_run(p: ArrayLike, rho: Sequence[float] = UNCORRELATED) -> np.ndarray:
    """``previous``: variance of the sum of one sender's gradients over T steps, over T and the variance; T to infinity.

    A gradient is used again until the next arrives. m steps later it is the same one with probability p^m, else one of
    age B < m, rho(m - B + A) apart: 1 + 2p/(1-p) + 2 sum of (1-p^n) rho(n), which is (1+p)/(1-p) for white gradients.
    """
    p = _rate(p)
    rho = np.asarray(rho, dtype=np.float64)
    lags = np.arange(1, len(rho))
    return (1 + p) / (1 - p) + 2 * ((1 - p[..., None] ** lags) * rho[1:]).sum(axis=-1)


def _pair_share(count: np.ndarray, total: int) -> np.ndarray:
    """Probability that two given senders of ``total`` are both among ``count`` survivors."""
    return count * (count - 1) / max(total * (total - 1), 1)


def _binomial(trials: int, p: np.ndarray) -> np.ndarray:
    """float64[..., trials + 1]: P(k of ``trials`` arrive), through logarithms, since coefficients overflow."""
    arrived = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    choices = factorials[-1] - factorials - factorials[::-1]
    lost = trials - arrived
    with np.errstate(divide="ignore", invalid="ignore"):
        losing = np.where(lost == 0, 0.0, lost * np.log(p)[..., None])
    chance = np.exp(choices + arrived * np.log1p(-p)[..., None] + losing)
    return chance / chance.sum(axis=-1, keepdims=True)
