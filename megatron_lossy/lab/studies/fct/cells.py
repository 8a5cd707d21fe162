"""Many messages under the same conditions: the distribution of their completion times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ....base.errors import UsageError
from .path import Losses, Path
from .schemes import Adaptive, Scheme, SelectiveRepeat, Smart, Tolerant, Uniform

_RESAMPLES = 400


@dataclass(frozen=True)
class Condition:
    """A message of ``size`` bytes, a loss rate, and more.

    ``burst``: mean number of losses in a row (``None``: independent). ``timeout``: the RTO in round trips.
    """

    size: float
    rate: float
    timeout: float = 2.0
    burst: float | None = None


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """Completion times in microseconds under one condition.

    ``again``, ``parities``, ``zeros``: packets per packet of data.
    """

    scheme: str
    condition: Condition
    mean: Interval
    median: float
    p99: Interval
    again: float
    parities: float
    zeros: float


def make_scheme(name: str, given: Mapping[str, Any], timeout: float) -> Scheme:
    """The scheme that a study calls ``name``. Raises :class:`UsageError` for settings that it does not have."""
    settings = dict(given)
    recovery = settings.pop("recovery", None)
    kinds: dict[str, type[Scheme]] = {
        "selective-repeat": SelectiveRepeat,
        "uniform": Uniform,
        "smart": Smart,
        "tolerant": Tolerant,
        "adaptive": Adaptive,
    }
    if recovery not in kinds:
        raise UsageError(f"schemes: {name}: recovery {recovery}: must be one of {', '.join(kinds)}")
    try:
        return kinds[recovery](timeout=timeout, **settings)
    except TypeError:
        raise UsageError(f"schemes: {name}: {settings}: not settings of {recovery}") from None


def run_cell(name: str, given: Mapping[str, Any], condition: Condition, path: Path, flows: int, seed: int) -> Cell:
    """Send ``flows`` messages, one after another. All schemes have the same losses."""
    scheme = make_scheme(name, given, condition.timeout)
    packets = path.packets(condition.size)
    done = [scheme.flow(path, packets, Losses(condition.rate, seed, flow, condition.burst)) for flow in range(flows)]
    times = np.array([one.time for one in done])
    random = np.random.default_rng(seed)
    resampled = times[random.integers(0, flows, (_RESAMPLES, flows))]
    data = flows * packets
    return Cell(
        name,
        condition,
        _interval(times.mean(), resampled.mean(axis=1)),
        float(np.median(times)),
        _interval(np.percentile(times, 99), np.percentile(resampled, 99, axis=1)),
        again=sum(one.again for one in done) / data,
        parities=sum(one.parities for one in done) / data,
        zeros=sum(one.zeros for one in done) / data,
    )


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))
