"""Closed forms against enumeration of all masks in plain NumPy, and against the real channels and recovery rules.

Enumerations are exact. Simulations have fixed seeds and a standard error; comparisons allow five of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import BucketUnits, Exchange, Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.virtual.in_memory import Memory
from megatron_lossy.transport import Network

pytestmark = pytest.mark.shows("drift, ages and weights: enumeration, channels, rules", device=False)

RULES = [
    ("renormalize", False),
    ("renormalize", True),
    ("renormalize-remote", False),
    ("zero", False),
    ("zero", True),
    ("previous", False),
    ("previous", True),
]
RATES = st.floats(0.001, 0.95)


def close(measured, expected):
    assert abs(measured.mean - expected) <= 5 * measured.error + 1e-6, (measured, float(expected))


# --- Ages and drift by enumeration -----------------------------------------------------------------------------------


def bernoulli(lost, p):
    return np.prod(np.where(lost, p, 1 - p))


def chain(lost, transitions):
    """Probability of a history of losses under Gilbert-Elliott, by summing over all histories of states."""
    to_bad, to_good, *losses = transitions
    bad = to_bad / (to_bad + to_good)
    move = {(0, 0): 1 - to_bad, (0, 1): to_bad, (1, 0): to_good, (1, 1): 1 - to_good}
    total = 0.0
    for states in itertools.product((0, 1), repeat=len(lost)):
        value = (1 - bad, bad)[states[0]]
        for pair in itertools.pairwise(states):
            value *= move[pair]
        for state, gone in zip(states, lost):
            value *= losses[state] if gone else 1 - losses[state]
        total += value
    return total


def age_of(lost):
    """Updates missed by a replica that was equal before the first of these broadcasts."""
    return next((k for k, gone in enumerate(reversed(lost)) if not gone), len(lost))


def drift_by_hand(steps, chance):
    """Drift to the owner and between two receivers: all histories of losses, all pairs of ages."""
    ages = np.zeros(steps + 1)
    for lost in itertools.product((False, True), repeat=steps):
        ages[age_of(lost)] += chance(np.array(lost))
    assert np.isclose(ages.sum(), 1)
    gaps = np.abs(np.subtract.outer(range(steps + 1), range(steps + 1)))
    return ages @ range(steps + 1), ages @ gaps @ ages


def drift_of(p, r, gamma=(1.0,)):
    """The formulas of docs/theory.md, for increments of the autocovariance ``gamma``."""
    alike = gamma[0] + 2 * (r ** np.arange(1, len(gamma)) @ gamma[1:])
    return p / (1 - r) * alike, 2 * p * (1 - p / (1 + r)) / (1 - r) * alike


@pytest.mark.parametrize("transitions", [(0.0625, 0.25, 0.0, 1.0), (2 / 3, 1.0, 0.0, 1.0), (0.1, 0.3, 0.05, 0.7)])
def test_drift_after_some_steps(transitions):
    """Bursts, losses that never follow each other, and losses in both states of the chain."""
    for steps in (1, 2, 7):
        expected = drift_by_hand(steps, lambda lost: chain(lost, transitions))
        np.testing.assert_allclose(theory.drift_of_ages(theory.burst_tail(transitions, steps)), expected, rtol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.4])
def test_drift_of_independent_losses(p):
    """On the way, as enumerated and as the page has it; and once it has settled, there and for bursts."""
    owner, between = p / (1 - p), 2 * p / (1 - p**2)
    for t in (1, 2, 7):
        found = theory.drift_of_ages(p ** np.arange(1, t + 1))
        np.testing.assert_allclose(found, drift_by_hand(t, lambda lost: bernoulli(lost, p)), rtol=1e-12)
        np.testing.assert_allclose(found, (owner * (1 - p**t), between * (1 - p**t) * (1 - p ** (t + 1))), rtol=1e-12)
    for r in (p, 0.75):
        np.testing.assert_allclose(theory.drift_of_ages(p * r ** np.arange(200)), drift_of(p, r), rtol=1e-9)
    np.testing.assert_allclose(drift_of(p, p), (owner, between))


def test_what_is_no_rate_is_refused():
    with pytest.raises(ValueError, match=r"must be in \[0, 1\)"):
        theory.weights("zero", 1.0, 4)
    with pytest.raises(ValueError, match="no such recovery rule"):
        theory.weights("renormalize-remote", 0.1, 4, lossy_self=True)


# --- Recovery by enumeration -----------------------------------------------------------------------------------------


def weights_by_hand(rule, arrived):
    """Weights of N gradients, the owner's first; ``arrived`` bool[N]."""
    count = len(arrived)
    if rule == "zero":
        return arrived / count
    if rule == "renormalize":
        return arrived / max(arrived.sum(), 1)
    result, remote = np.zeros(count), arrived[1:].sum()
    result[0] = 1 / count if remote else 1
    result[1:] = arrived[1:] * (count - 1) / count / max(remote, 1)
    return result


def masks(rule, p, workers, lossy_self, steps=1):
    """(probability, weights) of everything that can happen; for previous in the last of so many steps."""
    for flat in itertools.product((False, True), repeat=steps * workers):
        arrived = np.array(flat).reshape(steps, workers)
        if not lossy_self and not arrived[:, 0].all():
            continue
        chance = np.prod(np.where(arrived if lossy_self else arrived[:, 1:], 1 - p, p))
        if rule == "previous":
            yield chance, arrived.any(axis=0) / workers
        else:
            yield chance, weights_by_hand(rule, arrived[0])


@pytest.mark.parametrize(("rule", "lossy_self"), RULES)
@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("p", [0.0, 0.1, 0.4])
def test_weights(rule, lossy_self, workers, p):
    """Every moment, by summing over all masks."""
    steps = 3 if rule == "previous" else 1
    cases = list(masks(rule, p, workers, lossy_self, steps))
    chance = np.array([chance for chance, _ in cases])
    drawn = np.array([weights for _, weights in cases])
    assert np.isclose(chance.sum(), 1)
    result = theory.weights(rule, p, workers, lossy_self, step=3 if rule == "previous" else None)
    second = np.einsum("m,mi,mk->ik", chance, drawn, drawn)
    np.testing.assert_allclose(result.own, chance @ drawn[:, 0], atol=1e-15)
    np.testing.assert_allclose(result.own_own, second[0, 0])
    for other in range(1, workers):
        np.testing.assert_allclose(result.other, chance @ drawn[:, other])
        np.testing.assert_allclose(result.own_other, second[0, other])
        np.testing.assert_allclose(result.same_other, second[other, other])
    if workers > 2:
        np.testing.assert_allclose(result.other_other, second[1, 2])
    total = drawn.sum(axis=1)
    np.testing.assert_allclose(result.total, chance @ total)
    np.testing.assert_allclose(result.noise, chance @ (drawn**2).sum(axis=1))
    np.testing.assert_allclose(result.total_variance, chance @ total**2 - (chance @ total) ** 2, atol=1e-14)


@pytest.mark.parametrize("lossy_self", [False, True])
def test_survivors(lossy_self):
    counts = np.zeros(5)
    for flat in itertools.product((False, True), repeat=4):
        if lossy_self or flat[0]:
            counts[sum(flat)] += bernoulli(~np.array(flat[0 if lossy_self else 1 :]), 0.3)
    np.testing.assert_allclose(theory.survivors(0.3, 4, lossy_self), counts, atol=1e-15)


@given(p=RATES, workers=st.integers(1, 300), rule=st.sampled_from(RULES))
@settings(deadline=None)
def test_weights_in_general(p, workers, rule):
    """Unbiased rules sum to 1 (or 1 - p^N); no rule beats the plain mean at its own expectation; p = 0 is exact."""
    name, lossy_self = rule
    result = theory.weights(name, p, workers, lossy_self)
    if name in ("renormalize", "renormalize-remote"):
        np.testing.assert_allclose(result.total, 1 - (p**workers if lossy_self else 0))
    assert result.noise >= result.total**2 / workers * (1 - 1e-9)
    assert result.total_variance >= -1e-9
    without = theory.weights(name, 0.0, workers, lossy_self)
    np.testing.assert_allclose([without.own, without.total, without.noise], [1 / workers, 1, 1 / workers])


@pytest.mark.parametrize("p", [0.0, 0.1, 0.3])
def test_previous_over_time(p):
    """Covariances of a substituted gradient with itself, later, by enumeration of the losses."""
    rho = np.array([1.0, 0.6, 0.1, -0.2])
    history, lags = 9, 6  # a sender lost 9 times in a row counts as received before that: p^10 is 6e-6

    def correlation(lag):
        return rho[abs(lag)] if abs(lag) < len(rho) else 0.0

    sums, stale = 1.0, 0.0
    for lost in itertools.product((False, True), repeat=history + lags):
        chance = bernoulli(np.array(lost), p)
        now = history - 1 - age_of(lost[:history])  # when the gradient in use was computed
        stale += chance * 2 * (1 - correlation(age_of(lost[:history])))
        for lag in range(1, lags + 1):
            later = history - 1 + lag - age_of(lost[: history + lag])
            sums += chance * 2 * correlation(later - now)
    rest = np.arange(lags + 1, 60)  # beyond the reach of rho only the same gradient, used again, counts ...
    sums += 2 * (p**rest).sum()
    # ... and one that is newer than it, at most 3 steps apart.
    for lag in rest:
        for old in range(20):
            for new in range(lag):
                sums += 2 * (1 - p) ** 2 * p ** (old + new) * correlation(lag - new + old)
    np.testing.assert_allclose(theory.previous_staleness(p, rho), stale, atol=1e-4)
    np.testing.assert_allclose(theory.previous_long_run(p, rho), sums, rtol=1e-3)
    np.testing.assert_allclose(theory.previous_long_run(p), (1 + p) / (1 - p))


# --- The real channels and rules -------------------------------------------------------------------------------------
# Replicas hold random walks instead of a model's weights. Losses use the code of training.


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error, from parts that are independent, or much longer than their correlations."""

    mean: float
    error: float

    @classmethod
    def over(cls, values: np.ndarray, blocks: int | None = None) -> "Measured":
        """Return the mean of ``values`` [n], which are independent, or cut into ``blocks`` of consecutive ones."""
        if blocks is not None:
            values = np.array([part.mean() for part in np.array_split(values, blocks)])
        return cls(float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values))))


def random_walk(steps: int, shape: tuple[int, ...], phi: float, seed: int) -> np.ndarray:
    """Return float64[steps, *shape]: increments of variance 1 whose autocorrelation at lag k is phi^k."""
    noise = np.random.default_rng(seed).standard_normal((steps, *shape))
    for before, now in itertools.pairwise(noise):
        now *= np.sqrt(1 - phi**2)
        now += phi * before
    return noise


def drift(config: LossyConfig, workers: int, increments: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return drift between two receivers, and to the owner, after each broadcast of replicas that start equal.

    ``increments`` [steps, N, coordinates]: each owner's additions to the weights of its shard. Return float64[steps,
    coordinates] twice: means over shards, and over pairs of receivers or over receivers.
    """
    arrived = arrivals(config, workers, 1)
    steps, _, coordinates = increments.shape
    owner = np.zeros((workers, coordinates))
    replicas = np.zeros((workers, workers, coordinates))  # receiver, source
    between, to_owner = np.empty((2, steps, coordinates))
    for step in range(steps):
        owner += increments[step]
        np.copyto(replicas, owner, where=arrived(step))
        between[step], to_owner[step] = squared_differences(replicas - owner).mean(axis=1)
    return between, to_owner


def arrivals(config: LossyConfig, workers: int, units: int) -> Callable[[int], np.ndarray]:
    """Return a function of the step: bool[receivers, sources, units], the parameters that arrive."""
    cuts = {"param": [BucketUnits(0, units, units, 1)]}
    memory = Memory({"param": Network(config, "param", workers)}, Stream(), range(workers), cuts)
    return lambda step: memory.foresee(Exchange("param", Stream(), step)).arrived


def squared_differences(gaps: np.ndarray) -> np.ndarray:
    """Return [2, ...]: mean squared difference between two receivers, and to the owner.

    ``gaps`` [N, ...]: each worker's value minus the owner's; 0 for the owner itself, whichever worker that is. The sum
    over pairs of (a-b)^2 is n sum of a^2 - (sum of a)^2; gaps are small, so that nothing cancels.
    """
    receivers = len(gaps) - 1
    squares, square = (gaps**2).sum(axis=0), gaps.sum(axis=0) ** 2
    pairs = receivers * (receivers - 1) / 2
    between = (receivers * squares - square) / pairs if pairs else np.zeros_like(squares)
    return np.stack([between, squares / receivers])


def ages(
    config: LossyConfig, workers: int, steps: int, units: int = 1, burn_in: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Counts of each age over all links and units, the largest age of a worker, and the largest of all, per step.

    Return int64[steps, ages], float64[steps] (mean over workers) and int64[steps]; after ``burn_in`` more steps.
    """
    arrived = arrivals(config, workers, units)
    age = np.zeros((workers, workers, units), dtype=np.int64)
    remote = ~np.eye(workers, dtype=bool)
    counts, of_worker, of_all = [], np.empty(steps), np.empty(steps, dtype=np.int64)
    for step in range(-burn_in, steps):
        age += 1
        age[arrived(step + burn_in)] = 0
        if step >= 0:
            counts.append(np.bincount(age[remote].ravel()))
            of_worker[step], of_all[step] = age.max(axis=(1, 2)).mean(), age.max()
    table = np.zeros((steps, max(map(len, counts))), dtype=np.int64)
    for row, count in zip(table, counts, strict=True):
        row[: len(count)] = count
    return table, of_worker, of_all


@pytest.mark.parametrize("burst", [None, 4.0])
def test_simulated_drift(burst):
    """Real channels on random walks: uncorrelated and with momentum, in the steady state and on the way to it."""
    bursts = {} if burst is None else {"loss_model": (f"gilbert-elliott:{burst}",)}
    steps, workers, p = 900, 24, 0.3
    walks = [random_walk(steps, (workers, 4), phi, 1) for phi in (0, 0.9)]
    series = drift(LossyConfig(p_param=p, **bursts), workers, np.concatenate(walks, axis=2))
    r = p if burst is None else 1 - 1 / burst
    for gamma, chosen in (((1.0,), slice(0, 4)), (0.9 ** np.arange(500), slice(4, 8))):
        for expected, values in zip(drift_of(p, r, gamma), reversed(series), strict=True):
            measured = Measured.over(values[100:, chosen].mean(axis=1), 16)
            assert measured.error < 0.05 * measured.mean
            close(measured, expected)
    if burst is None:  # and not as the paper says
        assert abs(series[0][100:, :4].mean() - 2 * p / (1 + p)) > 0.15


@pytest.mark.parametrize(("burst", "units"), [(None, 1), (None, 5), (3.0, 1), (3.0, 2)])
def test_ages_of_the_channels(burst, units):
    """Shares of each age over links, and the largest age; with bursts and several units a step too."""
    p, workers = 0.3, 16
    bursts = {} if burst is None else {"loss_model": (f"gilbert-elliott:{burst}",)}
    counts, of_worker, of_all = ages(LossyConfig(p_param=p, **bursts), workers, 800, units, burn_in=60)
    assert (counts.sum(axis=1) == workers * (workers - 1) * units).all()
    tail = p * (p if burst is None else 1 - 1 / burst) ** np.arange(30)
    if burst is not None and units > 1:
        tail = theory.burst_tail((p / (1 - p) / burst, 1 / burst, 0.0, 1.0), 30, units)
    exactly = -np.diff(tail, prepend=1.0)
    for age in range(4):
        close(Measured.over(counts[:, age] / counts[0].sum(), 16), exactly[age])
    if burst is None:  # units of a link are then independent
        for largest, links in ((of_worker, workers - 1), (of_all.astype(float), workers * (workers - 1))):
            close(Measured.over(largest, 16), (1 - (1 - tail) ** (links * units)).sum())
