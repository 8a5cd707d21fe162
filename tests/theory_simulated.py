"""Simulations of the closed forms with the real channels and the real recovery rules.

Replicas hold random walks instead of a model's weights, and gradients are random numbers. Losses and their recovery use
the code of training.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_lossy.base.exchange import BucketUnits, Exchange, Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.virtual.in_memory import Memory
from megatron_lossy.transport import Network


@dataclass(frozen=True)
class Measured:
    """A mean and its standard error, from parts that are independent, or much longer than their correlations."""

    mean: float
    error: float

    @classmethod
    def over(cls, values: np.ndarray, blocks: int | None = None) -> Measured:
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
    arrived = _arrivals(config, "param", workers, 1)
    steps, _, coordinates = increments.shape
    owner = np.zeros((workers, coordinates))
    replicas = np.zeros((workers, workers, coordinates))  # receiver, source
    between, to_owner = np.empty((2, steps, coordinates))
    for step in range(steps):
        owner += increments[step]
        np.copyto(replicas, owner, where=arrived(step))
        between[step], to_owner[step] = squared_differences(replicas - owner).mean(axis=1)
    return between, to_owner


def _memory(config: LossyConfig, phase: str, workers: int, cuts: Sequence[BucketUnits]) -> Memory:
    return Memory({phase: Network(config, phase, workers)}, Stream(), range(workers), {phase: cuts})


def _arrivals(config: LossyConfig, phase: str, workers: int, units: int) -> Callable[[int], np.ndarray]:
    """Return a function of the step: bool[receivers, sources, units], the units that arrive."""
    memory = _memory(config, phase, workers, [BucketUnits(0, units, units, 1)])
    return lambda step: memory.foresee(Exchange(phase, Stream(), step)).arrived


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
    arrived = _arrivals(config, "param", workers, units)
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
