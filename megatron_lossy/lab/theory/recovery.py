"""Expectation and variance of recovered gradients, for each recovery rule (docs/theory.md). NumPy only.

p is the loss rate of gradients (``--p-grad``), N the number of workers. An owner's estimate is the sum of w g: each
rule gives the N gradients weights that depend only on which of them arrived. So with gradients that are independent of
the losses and of each other, of means mu_i and variances v_i,

    E estimate = sum of E[w_i] mu_i,    Var estimate = sum of E[w_i^2] v_i + Var(sum of w_i mu_i),

and the first two moments of the weights are sufficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from .lag import rate_array


def survivors(p: ArrayLike, workers: int, lossy_self: bool = False) -> np.ndarray:
    """Return float64[..., workers + 1]: P(K = k) for K of ``workers`` gradients at the owner, its own among them.

    K = 1 + Binomial(N-1, 1-p); Binomial(N, 1-p) with ``--lossy-self``. Mean 1 + (N-1)(1-p) and N(1-p).
    """
    p = rate_array(p)
    if lossy_self:
        return _binomial(workers, p)
    return np.concatenate([np.zeros((*p.shape, 1)), _binomial(workers - 1, p)], axis=-1)


@dataclass(frozen=True)
class Weights:
    """First and second moments, over the losses, of the weights w that N ``workers``' gradients get at an owner.

    The owner's estimate is the sum of w g. ``own``: E w of the owner's gradient; ``other``: of each other one.
    ``own_own``, ``own_other``, ``other_other``: E of the products; ``same_other``: E of the square of another's. Arrays
    have the shape of p. Losses are exchangeable over the others, so that these moments are sufficient.
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
        """E of the sum of weights; the factor on the expectation if all gradients have the same one."""
        return self.own + (self.workers - 1) * self.other

    @property
    def noise(self) -> np.ndarray:
        """E of the sum of squared weights: the variance of the estimate relative to that of one of i.i.d. gradients,
        mean 0.

        Without loss it is 1/N. With mean m, add m^2 times :attr:`total_variance`.
        """
        return self.own_own + (self.workers - 1) * self.same_other

    @property
    def total_variance(self) -> np.ndarray:
        """Variance of the sum of weights."""
        others = self.workers - 1
        pairs = 2 * others * self.own_other + others * (others - 1) * self.other_other
        return self.noise + pairs - self.total**2


def weights(rule: str, p: ArrayLike, workers: int, lossy_self: bool = False, step: int | None = None) -> Weights:
    """Return weights that ``--grad-recovery rule`` gives, for losses of rate ``p`` that are independent over senders.

    One step's weights are the same under bursts and under ``--loss-correlation source``: the rate alone matters.
    ``step``: for ``previous``, the number of exchanges so far; the default is the steady state. There all weights are
    1/N, and its gradients are old (:func:`previous_staleness`).

    The weights follow from the number of survivors: given K, every sender is among them with the same probability, and
    so is every pair.
    """
    p = rate_array(p)
    others, unit = workers - 1, np.ones_like(p)
    remote = np.arange(workers)  # number of remote survivors
    if rule in ("zero", "previous"):
        # previous: with gradients constant in time, only gradients that were never received are missing.
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
    return Weights(workers, *moments)


def previous_staleness(p: ArrayLike, rho: Sequence[float]) -> np.ndarray:
    """Return, for ``previous``, the mean squared error of a sender's substituted gradient, over variance.

    E (g(t-A) - g(t))^2 = 2 (1 - E rho(A)), with autocorrelation ``rho`` (lags from 0, rho[0] = 1; 0 beyond) and A as
    for parameters. The estimate's error against the plain mean of the current gradients is (N-1)/N^2 of this, while its
    variance stays 1/N: a substituted gradient is as noisy as a lost one.
    """
    p = rate_array(p)
    return 2 * (1 - (1 - p) * (p[..., None] ** np.arange(len(rho)) * np.asarray(rho, np.float64)).sum(axis=-1))


def previous_long_run(p: ArrayLike, rho: Sequence[float] = (1.0,)) -> np.ndarray:
    """Return, for ``previous``, the variance of a sum of a sender's gradients over T steps, over T and theirs; large T.

    A gradient is used again until the next arrives. m steps later it is the same one with probability p^m. Else it is
    one of age B < m, rho(m - B + A) apart: 1 + 2p/(1-p) + 2 sum of (1-p^n) rho(n), n >= 1; uncorrelated (1+p)/(1-p).
    """
    p = rate_array(p)
    lags = np.arange(1, len(rho))
    return (1 + p) / (1 - p) + 2 * ((1 - p[..., None] ** lags) * np.asarray(rho, np.float64)[1:]).sum(axis=-1)


def error_feedback_variance(p: ArrayLike) -> np.ndarray:
    """Return, for ``error-feedback``, the variance of a sender's contribution in a step, over its squared gradient.

    With probability 1 - p its payload arrives, 1 + A gradients after A losses in a row: E = 1 and E w^2 = (1-p) E
    (1+A)^2 = (1+p)/(1-p). With N senders, the owner's always there, the mean has (N-1)/N^2 of 2p/(1-p). Gradients
    independent over time add no more than without loss: each is applied once.
    """
    p = rate_array(p)
    return 2 * p / (1 - p)


def error_feedback_residual(p: ArrayLike) -> np.ndarray:
    """Return, for ``error-feedback``, the mean residual of a sender for one destination, over its gradient: p/(1-p)."""
    p = rate_array(p)
    return p / (1 - p)


def _pair_share(count: np.ndarray, total: int) -> np.ndarray:
    """Return probability that two given senders of ``total`` are both among ``count`` survivors."""
    return count * (count - 1) / max(total * (total - 1), 1)


def _binomial(trials: int, p: np.ndarray) -> np.ndarray:
    """Return float64[..., trials + 1]: P(k of ``trials`` arrive), through logarithms, since coefficients overflow."""
    arrived = np.arange(trials + 1)
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, trials + 1)))])
    choices = factorials[-1] - factorials - factorials[::-1]
    lost = trials - arrived
    with np.errstate(divide="ignore", invalid="ignore"):
        losing = np.where(lost == 0, 0.0, lost * np.log(p)[..., None])
    chance = np.exp(choices + arrived * np.log1p(-p)[..., None] + losing)
    return chance / chance.sum(axis=-1, keepdims=True)


def mean_error(p: ArrayLike, workers: int, omega: ArrayLike, spread: ArrayLike, square: ArrayLike) -> np.ndarray:
    """Return, for ``renormalize``, E |estimate - mean of gradients|^2 with losses ``p`` and codes of error ``omega``.

    ``spread``: S^2. ``square``: E |g|^2 of a gradient. K gradients without replacement have the variance
    S^2 (1/K - 1/N); K - 1 of them bear an error of omega |g|^2 each, over K^2. Errors of different senders are independent,
    with mean 0, and the owner's own gradient is exact. S^2 is an estimate from N workers of the variance between them.
    """
    chance, count = survivors(rate_array(p), workers)[..., 1:], np.arange(1, workers + 1)
    few = (chance / count).sum(axis=-1) - 1 / workers
    coded = (chance * (count - 1) / count**2).sum(axis=-1)
    return few * np.asarray(spread) + coded * np.asarray(omega) * np.asarray(square)
