"""Metrics of islands: losses between them, the bytes of exchanges, and their distance (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.exchange import Delivery
from ...base.fetch import Fetched
from ...run.monitor.observer import Observer
from ...run.monitor.window import Window
from .flags import SYNC_PHASES
from .rounds import Mean

#: The most measurements that stay on the device, if a run never asks for them.
_UNREAD = 1000


class IslandMonitor(Observer):
    """Metrics since the last record, of all islands or of this process's island.

    ``spread``: measures the present distances of islands, by name. Without it distances come from the exchanged
    vectors, as they were sent.
    """

    def __init__(self, spread: Callable[[], dict[str, float]] | None = None) -> None:
        lost_and_sent = [f"{phase} {column}" for phase in SYNC_PHASES for column in ("lost", "sent")]
        self._window = Window([*lost_and_sent, "exchanges", "bytes", "used", "seconds", "squares", "elements"])
        self._spread = spread
        self._measured: list[tuple[torch.Tensor, torch.Tensor | int]] = []  # still on the device

    def observe(self, delivery: Delivery) -> None:
        arrived, phase = delivery.arrived[delivery.crossing], delivery.exchange.phase
        if phase not in SYNC_PHASES:
            return
        self._window.add(**{f"{phase} lost": arrived.size - int(arrived.sum()), f"{phase} sent": arrived.size})

    def exchanged(self, sent: float) -> None:
        """Count an exchange that begins; an island sends ``sent`` bytes in it."""
        self._window.add(exchanges=1, bytes=sent)

    def used(self, seconds: float, sent: torch.Tensor, mean: Mean, stride: int = 1) -> None:
        """Count ``mean``, which was used after ``seconds`` of waiting, and its distance to the values ``sent`` [1, k].

        ``stride``: between the elements that are looked at. The sum of squared distances over those that arrived stays on the device
        until it is asked for: nothing waits for the device, and no shape depends on losses.
        """
        self._window.add(used=1, seconds=seconds)
        distance = mean.values[::stride] - sent[0, ::stride]
        elements: torch.Tensor | int = distance.numel()
        if mean.arrived is not None:
            arrived = mean.arrived[0, ::stride]
            distance, elements = distance.where(arrived, 0.0), arrived.sum()
        self._measured.append((distance.dot(distance), elements))
        if len(self._measured) == _UNREAD:
            self._read()

    def waited(self, seconds: float) -> None:
        """Count ``seconds`` of waiting for other islands, for another reason than a mean."""
        self._window.add(seconds=seconds)

    def _read(self) -> None:
        measured, self._measured = self._measured, []
        if not measured:
            return
        counted = [count for _, count in measured if isinstance(count, torch.Tensor)]
        fetched = [Fetched(torch.stack(one)) for one in ([one for one, _ in measured], counted) if one]
        squares, counts = fetched[0].wait().tolist(), iter(fetched[1].wait().tolist() if counted else ())
        for one, (_, count) in zip(squares, measured, strict=True):
            self._window.add(squares=one, elements=next(counts) if isinstance(count, torch.Tensor) else count)

    def restart(self, iteration: int) -> None:
        self._measured.clear()
        self._window.clear()

    def metrics(self) -> dict[str, float]:
        self._read()
        total = self._window.close()
        sent = [phase for phase in SYNC_PHASES if total[f"{phase} sent"]]
        result = {f"loss rate {phase}": total[f"{phase} lost"] / total[f"{phase} sent"] for phase in sent}
        if total["exchanges"]:
            result["sync bytes"] = total["bytes"] / total["exchanges"]
        if self._spread is not None:
            return result | self._spread()
        if total["seconds"]:
            result["sync wait"] = total["seconds"] / max(total["used"], 1)
        if total["used"]:
            result["sync deviation"] = total["squares"] / max(total["elements"], 1)
        return result

    def state_dict(self) -> dict[str, Any]:
        self._read()
        return {"window": self._window.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window.load_state_dict(state["window"])
