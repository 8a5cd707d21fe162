"""Closed forms of ages and drift against enumeration in plain NumPy, and against the real channels.

Enumerations are exact. Simulations have fixed seeds and a standard error; comparisons allow five of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_lossy.base.exchange import BucketUnits, Exchange, Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab import theory
from megatron_lossy.lab.virtual.in_memory import Memory
from megatron_lossy.transport import Network

pytestmark = pytest.mark.shows("drift and ages: enumeration, channels", device=False)


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
