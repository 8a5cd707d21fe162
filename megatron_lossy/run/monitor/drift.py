"""The distance between replicas, measured and predicted (docs/monitors.md).

Every ``--drift-interval`` iterations all ranks gather the same sample of weights from their replicas. The measure is
the mean squared difference. It is computed in float64 from differences to the owner's value. The usual E[x^2] - E[x]^2
would cancel, because weights are far larger than their differences.

The prediction is a closed form of :mod:`megatron_lossy.base.theory` times the mean squared increment, which is measured.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ...base.exchange import Stream
from ...base.registry import CHANNELS
from ...config import LossyConfig
from .observer import Look, Observer, Replicas
from .window import Window

#: Sampled coordinates of a stream.
SAMPLE = 2048
_SEED = 20250707


class Sample:
    """At most ``count`` of the parameters of ``replicas``, spread evenly over the buckets. All ranks choose the same.

    ``places``: for each bucket int64. ``owners``: int64[S], the rank that owns each place. ``population``: the number
    of all parameters.
    """

    def __init__(self, replicas: Replicas, count: int = SAMPLE) -> None:
        runs = [(k, first, last) for k, used in enumerate(replicas.used()) for first, last in used.tolist()]
        bucket, first, last = np.array(runs, dtype=np.int64).reshape(-1, 3).T
        ends = np.cumsum(last - first)
        self.population = int(ends[-1])
        if self.population <= count:
            chosen = np.arange(self.population)
        else:  # one in each of equal strata
            edges = np.arange(count + 1) * self.population // count
            chosen = edges[:-1] + (np.random.default_rng(_SEED).random(count) * np.diff(edges)).astype(np.int64)
        run = np.searchsorted(ends, chosen, side="right")
        offset = last[run] - (ends[run] - chosen)
        self.places = [offset[bucket[run] == k] for k in range(len(replicas.shards))]
        owners = [places // shard for places, shard in zip(self.places, replicas.shards, strict=True)]
        self.owners = np.concatenate(owners)


def discrepancies(values: np.ndarray, owners: np.ndarray) -> tuple[float, float]:
    """Return two mean squared differences: between all pairs of replicas, and between the owner and the others.

    Both are means over all coordinates. ``values`` is float64[N, S] with N at least 2, ``owners`` is int64[S].
    """
    workers, coordinates = values.shape
    differences = values - values[owners, np.arange(coordinates)]
    squares = (differences**2).sum(axis=0)
    # Sum over pairs of (d_i - d_j)^2. The owner's d is 0, which keeps it from cancelling.
    pairs = workers * squares - differences.sum(axis=0) ** 2
    return float(pairs.mean()) * 2 / (workers * (workers - 1)), float(squares.mean()) / (workers - 1)


def predicted(config: LossyConfig, step: int, workers: int, units: int) -> tuple[float, float] | None:
    """Return the two discrepancies in the steady state, for uncorrelated increments with a mean square of 1.

    The loss rate is that of ``step``. A step has ``units`` units of loss. Return ``None`` if links differ in their
    losses, if they are unknown, if packets are sent several times, or if owners send other values than their weights.
    """
    loss = config.phase("param")
    if config.observed or config.copies("param") > 1:
        return None
    if loss.lossless:
        return 0.0, 0.0
    if not config.sends_weights():
        return None
    drift = CHANNELS.load(loss.model).drift(loss, step, units) if config.ranks_of_node is None else None
    if drift is None:
        return None
    owner, between = drift
    if config.loss_correlation == "source":
        between = 0.0
    return 2 / workers * owner + (1 - 2 / workers) * between, owner


class Drift(Observer):
    """The discrepancies since the last record, over all streams."""

    def __init__(self, config: LossyConfig) -> None:
        self._config = config
        self._samples: dict[Any, Sample] = {}
        self._before: dict[Stream, np.ndarray] = {}
        columns = ["weight", "drift pairs", "drift owner", "square", "moved", "squared increment", "foreseen"]
        self._window = Window([*columns, "drift pairs predicted", "drift owner predicted"])

    def _due(self, iteration: int) -> bool:
        """Return whether to measure at the end of ``iteration`` (from 0)."""
        return (iteration + 1) % self._config.drift_interval == 0

    def before_update(self, iteration: int, look: Look) -> None:
        self._before.clear()
        if self._due(iteration):
            for stream in look():
                self._before[stream.stream] = stream.own(self._sample(stream).places)

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        if not self._due(iteration):
            return
        if not successful:
            self._before.clear()
        for stream in look():
            if stream.workers > 1:
                self._measure(iteration, stream)
        self._before.clear()

    def _measure(self, iteration: int, replicas: Replicas) -> None:
        sample = self._sample(replicas)
        values = replicas.everyone(sample.places)
        pairs, owner = discrepancies(values, sample.owners)
        # Every rank of a group finds the same values; together they weigh as much as the group has parameters.
        weight = sample.population * len(replicas.owned) / replicas.workers
        square = float((values[sample.owners, np.arange(len(sample.owners))] ** 2).mean())
        self._window.add(weight=weight, square=weight * square)
        self._window.add(**{"drift pairs": weight * pairs, "drift owner": weight * owner})
        before = self._before.get(replicas.stream)
        if before is None:
            return  # the update was skipped
        mine = np.flatnonzero((sample.owners >= replicas.owned.start) & (sample.owners < replicas.owned.stop))
        share = sample.population / len(sample.owners)
        moved = share * len(mine)
        increment = share * float(((values[sample.owners[mine], mine] - before[mine]) ** 2).sum())
        self._window.add(moved=moved, **{"squared increment": increment})
        factors = predicted(self._config, iteration, replicas.workers, replicas.units)
        if factors is not None:
            names = ("drift pairs predicted", "drift owner predicted")
            self._window.add(foreseen=moved, **{name: factor * increment for name, factor in zip(names, factors)})

    def _sample(self, replicas: Replicas) -> Sample:
        key = (replicas.stream, *replicas.shards)
        if key not in self._samples:
            self._samples[key] = Sample(replicas)
        return self._samples[key]

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        result = {}
        for weight, columns in (
            ("weight", ("drift pairs", "drift owner")),
            ("moved", ("squared increment",)),
            ("foreseen", ("drift pairs predicted", "drift owner predicted")),
        ):
            if total[weight]:
                result |= {column: total[column] / total[weight] for column in columns}
        if total["square"]:
            result["drift over weight"] = math.sqrt(total["drift owner"] / total["square"])
        return result
