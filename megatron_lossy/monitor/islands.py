"""What exchanges between islands lost, how many bytes they took, and how far islands are apart (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config_islands import SYNC_PHASES
from ..exchange import Delivery
from .observer import Observer
from .window import Window


class IslandMonitor(Observer):
    """Metrics of all islands since the last record. ``spread``: measures how far they are apart now, by name."""

    def __init__(self, spread: Callable[[], dict[str, float]]) -> None:
        lost_and_sent = [f"{phase} {column}" for phase in SYNC_PHASES for column in ("lost", "sent")]
        self._window = Window([*lost_and_sent, "exchanges", "bytes"])
        self._spread = spread

    def observe(self, delivery: Delivery) -> None:
        arrived, phase = delivery.arrived[delivery.crossing], delivery.exchange.phase
        self._window.add(**{f"{phase} lost": arrived.size - int(arrived.sum()), f"{phase} sent": arrived.size})

    def exchanged(self, sent: float) -> None:
        """An exchange began, in which an island sends ``sent`` bytes."""
        self._window.add(exchanges=1, bytes=sent)

    def restart(self, iteration: int) -> None:
        self._window.clear()

    def metrics(self) -> dict[str, float]:
        total = self._window.close()
        result = {
            f"loss rate {phase}": total[f"{phase} lost"] / max(total[f"{phase} sent"], 1) for phase in SYNC_PHASES
        }
        if total["exchanges"]:
            result["sync bytes"] = total["bytes"] / total["exchanges"]
        return result | self._spread()

    def state_dict(self) -> dict[str, Any]:
        return {"window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
