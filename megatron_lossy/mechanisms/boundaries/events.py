"""Messages between pipeline stages as events: a row for each message of training that a rank received (docs/delivery_log.md#stage-boundaries)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ...config import LossyConfig
from ...delivery_log.events import Kinds, Row, percent
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

    @staticmethod
    def summary(rows: Iterable[tuple[int, Row]]) -> list[str]:
        lines = []
        for (phase, stream), total in sorted(totals(rows).items()):
            lines += ["", f"{phase}, {stream}, after layer {total['layer']} of {total['layers']}", *_lines(total)]
        return lines


def totals(rows: Iterable[tuple[int, Row]]) -> dict[tuple[str, str], Counter[str]]:
    """Return sums over the messages of each phase and stream. ``rows``: each with the rank that wrote it.

    ``asked``: packets that were sent again. ``layer`` and ``layers`` are those of the boundary.
    """
    found: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
    for writer, row in rows:
        # Peers of tensor parallelism record the same.
        first, total = found.setdefault((row["kind"], row["stream"]), (writer, Counter()))
        if first == writer:
            total.update({name: int(row[name]) for name in ("packets", "lost", "repaired", "again", "zeros")})
            total.update(messages=1, asked=(row["lost"] - row["repaired"]) * row["again"])
            total["layer"], total["layers"] = row["layer"], row["layers"]
    return {key: total for key, (_, total) in found.items()}


def _lines(total: Counter[str]) -> list[str]:
    def share(count: str, of: str) -> str:
        return percent(total[count] / max(1, total[of]))

    return [
        f"  lost      {total['lost']:,} of {total['packets']:,} packets, {share('lost', 'packets')}",
        f"  repaired  {total['repaired']:,} by parity, {share('repaired', 'lost')} of lost packets",
        (
            f"  again     {total['asked']:,} packets of {total['again']:,} of {total['messages']:,} messages, "
            f"{share('again', 'messages')} of these"
        ),
        f"  zeros     {total['zeros']:,} packets, {share('zeros', 'packets')}",
    ]


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
