"""Losses at boundaries between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from typing import Any

from ...run.monitor.observer import Observer
from ...run.monitor.window import Window
from .flags import BOUNDARY_PHASES
from .loss import Fate
from .messages import Message

_COLUMNS = ("packets", "raw", "zeros", "messages", "again")


class BoundaryObserver(Observer):
    """Receives messages between pipeline stages, beside the events of every run."""

    def crossed(self, message: Message, fate: Fate) -> None:
        """Called at once when a lossy message has arrived. ``fate``: its losses."""


class BoundaryMonitor(BoundaryObserver):
    """Metrics of all messages between stages since the last record, over all ranks."""

    def __init__(self) -> None:
        self._window = Window([f"{phase} {column}" for phase in BOUNDARY_PHASES for column in _COLUMNS])

    def crossed(self, message: Message, fate: Fate) -> None:
        counts = (fate.lost.size, fate.raw, int(fate.lost.sum()), 1, fate.again)
        self._window.add(**{f"{message.phase} {column}": value for column, value in zip(_COLUMNS, counts)})

    def restart(self, iteration: int) -> None:
        self._window.clear()

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

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
