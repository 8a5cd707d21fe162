"""One row on one rank of the pretended device, or of a CPU."""

from __future__ import annotations

import os
import warnings
from typing import Any

from megatron_lossy.lab.calibration import job
from megatron_lossy.lab.calibration.rows import Row
from tests.ranks import run_ranks

from .tracker import Findings


def run_row(rank: int, row: Row, data: dict[str, tuple[str, ...]], pretended: bool) -> tuple[job.Values, Findings]:
    """Return values of the row, and its work on the device. The iterations that count are the phase "steady"."""
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = "0"
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    from . import device
    from .tracker import Tracker

    tracker = Tracker()
    if pretended:
        device.install(tracker)

    def phase(name: str) -> None:
        tracker.phase = name

    values = job.run(row, data, lambda: phase("steady"), lambda: phase("last"))
    tracker.phase = "after"
    return values, tracker.findings()


class Runs:
    """Rows on ranks of their own, each run once; ``data``: settings that name the text."""

    def __init__(self, data: dict[str, tuple[str, ...]]) -> None:
        self._data = data
        self._known: dict[tuple[str, bool], list[Any]] = {}

    def __call__(self, row: Row, pretended: bool = True) -> list[tuple[job.Values, Findings]]:
        """Return the results of :func:`run_row` by rank. Raise :class:`~tests.ranks.RankFailed`."""
        key = row.name, pretended
        if key not in self._known:
            self._known[key] = run_ranks(run_row, row.ranks, row, self._data, pretended, grouped=False)
        return self._known[key]
