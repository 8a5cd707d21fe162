"""Messages between pipeline stages as events: a row for each message of training that a rank received (docs/delivery_log.md#stage-boundaries)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...config import LossyConfig
from ...delivery_log.events import Kinds
from ...run.monitor import Observer, Window
from .flags import BOUNDARY_PHASES
from .messages import Message

if TYPE_CHECKING:
    import pyarrow


class BoundaryEvents(Kinds):
    """Messages of both directions; the kind is the phase."""

    names = BOUNDARY_PHASES

    @staticmethod
    def columns() -> list[pyarrow.Field]:
        import pyarrow as pa

        return [
            *(pa.field(name, pa.int32()) for name in ("message", "packets", "lost", "repaired")),
            pa.field("again", pa.bool_()),
            pa.field("zeros", pa.int32()),
            pa.field("bitmap", pa.binary()),
            *(pa.field(name, pa.int32()) for name in ("layer", "layers")),
        ]

    @staticmethod
    def happen(config: LossyConfig) -> bool:
        return config.loses_at_boundaries


_COLUMNS = ("packets", "raw", "zeros", "messages", "again")


class BoundaryMonitor(Observer):
    """Metrics of all messages between stages since the last record, over all ranks."""

    def __init__(self) -> None:
        self._window = Window([f"{phase} {column}" for phase in BOUNDARY_PHASES for column in _COLUMNS])

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for event in what:
            if isinstance(event, Message):
                fate, phase = event.fate, event.phase
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
