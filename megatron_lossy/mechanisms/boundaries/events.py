"""Messages between pipeline stages as events: a row for each message of training that a rank received (docs/delivery_log.md#stage-boundaries).

For losses of a network the packets that became zeros are recorded; drawn losses are drawn again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from ...base.exchange import Stream
from ...config import LossyConfig
from ...delivery_log import schema
from ...delivery_log.kinds import Kinds, Row
from ...delivery_log.summary import percent
from .flags import BOUNDARY_PHASES
from .loss import Boundary, Fate
from .messages import Message, Messages

if TYPE_CHECKING:
    import pyarrow


@dataclass(frozen=True)
class Crossed:
    """The event that a lossy ``message`` has arrived. ``fate``: its losses. ``bitmaps``: whether zeros are recorded by number."""

    message: Message
    fate: Fate
    bitmaps: bool

    def rows(self) -> list[dict[str, Any]]:
        """Return the row for the log of events; none for a message of an evaluation."""
        message, fate = self.message, self.fate
        if message.evaluation:
            return []
        zeros = int(fate.lost.sum())
        row = {
            "kind": message.phase,
            "stream": message.stream.name,
            "message": message.number,
            "packets": len(fate.lost),
            "lost": fate.raw,
            "repaired": fate.raw - fate.residual,
            "again": fate.again,
            "zeros": zeros,
            "bitmap": _bitmap(fate) if zeros and self.bitmaps else None,
            "layer": message.boundary.layer,
            "layers": message.boundary.layers,
        }
        return [row]


def _bitmap(fate: Fate) -> bytes:
    return schema.pack(~fate.lost[None])[0].tobytes()


class BoundaryEvents(Kinds):
    """Messages of both directions; the kind is the phase."""

    names = BOUNDARY_PHASES

    def __init__(self, config: LossyConfig) -> None:
        super().__init__(config)
        self._observed = config.act_transport == "udp"
        self._seen: set[tuple[str, str]] = set()  # phase and stream

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

    def happen(self) -> bool:
        return self.config.loses_at_boundaries

    def check(self, iteration: int, rows: Sequence[Row]) -> None:
        of = itemgetter("kind", "stream")
        for (phase, stream), these in groupby(sorted(rows, key=of), key=of):
            self._seen.add((phase, stream))
            try:
                self._check_stream(iteration, phase, Stream.parse(stream), list(these))
            except ValueError as error:
                raise ValueError(f"{phase} of {stream}: {error}") from None

    def _check_stream(self, iteration: int, phase: str, stream: Stream, rows: Sequence[Row]) -> None:
        """Check that the numbers of ``rows`` agree, and that drawn losses equal a new draw."""
        expected = 0
        # Tensor-parallel copies have the zeros of all of them.
        more = self._observed and stream.tensor is not None
        for row in rows:
            # The numbers go on by one, or begin anew with a schedule that was run again.
            if row["message"] not in (0, expected):
                raise ValueError("a message is missing")
            expected = row["message"] + 1
            residual = row["lost"] - row["repaired"]
            zeros = 0 if row["again"] else residual
            fits = row["zeros"] >= zeros if more else row["zeros"] == zeros
            if not (fits and residual >= 0 and max(row["lost"], row["zeros"]) <= row["packets"]):
                raise ValueError("its numbers do not agree")
            if row["bitmap"] is not None:
                packed = np.frombuffer(row["bitmap"], dtype=np.uint8)[None]
                fits = packed.shape[1] == -(-row["packets"] // 8)
                if not fits or (~schema.unpack(packed, row["packets"])).sum() != row["zeros"]:
                    raise ValueError(f"message {row['message']}: bitmap and zeros do not agree")
        if not self._observed and not self._drawn_again(iteration, phase, stream, rows):
            raise ValueError("what is drawn again from the recorded seed is not what was recorded")

    def _drawn_again(self, iteration: int, phase: str, stream: Stream, rows: Sequence[Row]) -> bool:
        """Return whether the losses of ``rows`` are those of the seed and the flags."""
        messages = Messages(self.config)
        for row in rows:
            if row["message"] == 0:
                messages.begin(iteration, len(rows))
            boundary = Boundary(stream.stage, row["layer"], row["layers"], stream.chunk)
            fate = messages.next(phase, boundary, stream.expert_rank, stream.tensor or 0, iteration, row["packets"])
            recorded = (row["lost"], row["lost"] - row["repaired"], row["again"], row["zeros"])
            if recorded != (fate.raw, fate.residual, fate.again, fate.lost.sum()):
                return False
            if row["bitmap"] not in (None, _bitmap(fate)):
                return False
        return True

    def missing(self) -> list[str]:
        """Return a line for each boundary with records of one of two lossy directions: each has a rank of its own."""
        lossy = [phase for phase in self.names if self._observed or self.config.boundary_rate(phase)]
        return [
            f"no records of {phase} of {stream}"
            for stream in sorted({stream for _, stream in self._seen})
            for phase in lossy
            if (phase, stream) not in self._seen
        ]

    def summary(self, rows: Iterable[tuple[int, Row]]) -> list[str]:
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
        f"  repaired  {total['repaired']:,} by parity, {share('repaired', 'lost')} of what was lost",
        (
            f"  again     {total['asked']:,} packets of {total['again']:,} of {total['messages']:,} messages, "
            f"{share('again', 'messages')} of these"
        ),
        f"  zeros     {total['zeros']:,} packets, {share('zeros', 'packets')}",
    ]
