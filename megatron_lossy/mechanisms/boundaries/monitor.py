"""Losses at boundaries between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...run.monitor.observer import Observer
from ...run.monitor.window import Window
from .events import Crossed
from .flags import BOUNDARY_PHASES

_COLUMNS = ("packets", "raw", "zeros", "messages", "again")


class BoundaryMonitor(Observer):
    """Metrics of all messages between stages since the last record, over all ranks."""

    def __init__(self) -> None:
        self._window = Window([f"{phase} {column}" for phase in BOUNDARY_PHASES for column in _COLUMNS])

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for one in what:
            if isinstance(one, Crossed):
                fate, phase = one.fate, one.message.phase
                counts = (fate.lost.size, fate.raw, int(fate.lost.sum()), 1, fate.again)
                self._window.add(**{f"{phase} {column}": value for column, value in zip(_COLUMNS, counts)})

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        result = {}
        for phase in BOUNDARY_PHASES:
            packets, raw, zeros, messages, again = (total[f"{phase} {column}"] for column in _COLUMNS)
            if messages:
                result[f"loss rate {phase}"] = raw / packets
                result[f"zero share {phase}"] = zeros / packets
                result[f"retransmitted share {phase}"] = again / messages
        return result
