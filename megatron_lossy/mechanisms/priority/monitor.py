"""Metrics of the units that senders protect, and of the gradients that they keep (docs/smart.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ...recovery.base import Told
from ...run.monitor.observer import Look, Observer
from ...run.monitor.window import Window


class PriorityMonitor(Observer):
    """Metrics of ``--grad-priority`` and ``error-feedback``, over all ranks.

    ``told()``: the records of the latest exchange, one for each bucket.
    """

    def __init__(self, told: Callable[[], Iterable[Told]]) -> None:
        self._told = told
        self._window = Window(
            ["units", "high", "lost", "recovered", "left", "residual", "payload"],
            largest=["oldest"],
        )

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        for one in self._told():
            self._window.add(**vars(one))

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        if not total["units"]:
            return {}
        # Over a network the losses before repair are not known.
        recovered = {"recovered share": total["recovered"] / total["lost"]} if total["lost"] else {}
        return recovered | {
            "priority share": total["high"] / total["units"],
            "residual share": total["left"] / total["units"],
            "residual ratio": total["residual"] / total["payload"] if total["payload"] else 0.0,
            "oldest residual": max(total["oldest"], 0.0),
        }
