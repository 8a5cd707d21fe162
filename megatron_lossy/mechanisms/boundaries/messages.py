"""Numbers the messages of a step in the order of their arrival. Pure: NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...base.exchange import Stream
from ...config import LossyConfig
from ...delivery_log import schema
from .flags import BOUNDARY_PHASES
from .loss import Boundary, BoundaryLoss, Fate


def order(phase: str, table: Sequence[tuple[int, int]], first: bool, last: bool) -> list[tuple[int, int]]:
    """Return (micro-batch, model chunk) of each message that a rank receives in ``phase``, in order.

    ``table``: (micro-batch, model chunk) of each forward pass of the rank, in order; backward passes go through the
    chunks from the last on. ``first``, ``last``: whether it is the first or the last pipeline rank. The first makes the
    input of its first chunk itself, and the last the gradient of its last chunk.
    """
    highest, forward = max((chunk for _, chunk in table), default=0), phase == "act"
    passes = table if forward else [(number, highest - chunk) for number, chunk in table]
    end = 0 if forward else highest  # the chunk at the end of the pipeline, if this rank is there
    at_end = first if forward else last
    return [(number, chunk) for number, chunk in passes if not (at_end and chunk == end)]


@dataclass(frozen=True)
class Message:
    """A message that has arrived: number ``number`` of its ``stream`` since the schedule began, from 0.

    The stream has the tensor-parallel rank, unless its peers lose the same packets. ``fate``: its losses.
    ``evaluation``: whether its schedule is one of an evaluation.
    """

    phase: str
    boundary: Boundary
    stream: Stream
    number: int
    fate: Fate
    evaluation: bool

    def rows(self) -> list[dict[str, Any]]:
        """Return the row for the log of events; none for a message of an evaluation."""
        fate = self.fate
        if self.evaluation:
            return []
        zeros = int(fate.lost.sum())
        row = {
            "kind": self.phase,
            "stream": self.stream.name,
            "message": self.number,
            "packets": len(fate.lost),
            "lost": fate.raw,
            "repaired": fate.raw - fate.residual,
            "again": fate.again,
            "zeros": zeros,
            "bitmap": schema.pack(~fate.lost[None])[0].tobytes() if zeros else None,
            "layer": self.boundary.layer,
            "layers": self.boundary.layers,
        }
        return [row]


@dataclass
class _Draw:
    """The draw for a step of one stream.

    ``lost`` bool[units]; ``used``: the number of units that messages took; ``messages``: the number of these.
    """

    lost: np.ndarray
    used: int = 0
    messages: int = 0


class Messages:
    """The messages that a process receives. The units of a step are numbered on from message to message of a stream.

    A boundary's messages arrive in the order of the micro-batches, in both directions.
    """

    def __init__(self, config: LossyConfig) -> None:
        self.loss = {phase: BoundaryLoss(config, phase) for phase in BOUNDARY_PHASES}
        self._step = -1
        self._expected = 1
        self._drawn: dict[tuple[str, Stream], _Draw] = {}

    def begin(self, step: int, expected: int = 1) -> None:
        """Begin a schedule in attempted iteration ``step``. ``expected``: messages of each boundary, if these are
        alike.

        A schedule that is run again in a step loses the same units.
        """
        self._step, self._expected = step, expected
        self._drawn.clear()

    def next(
        self,
        phase: str,
        boundary: Boundary,
        rank: int,
        tensor: int | None,
        step: int,
        packets: int,
        evaluation: bool = False,
    ) -> Message:
        """Return the next message of ``packets`` at ``boundary``. Call it in the order of their arrival.

        ``rank``: data-parallel. ``tensor``: tensor-parallel, ``None`` if its peers lose the same packets.
        """
        if step != self._step:
            self.begin(step)
        loss, stream = self.loss[phase], replace(boundary.stream(rank), tensor=tensor)
        units = loss.units(boundary, packets)
        drawn = self._drawn.setdefault((phase, stream), _Draw(np.empty(0, dtype=bool)))
        first, drawn.used = drawn.used, drawn.used + units
        if drawn.used > len(drawn.lost):
            # A longer draw begins with the same units.
            wanted = max(drawn.used, self._expected * units, 2 * len(drawn.lost))
            drawn.lost = loss.draw(boundary, rank, tensor or 0, step, wanted)
        fate = loss.fate(boundary, packets, drawn.lost[first : drawn.used])
        number, drawn.messages = drawn.messages, drawn.messages + 1
        return Message(phase, boundary, stream, number, fate, evaluation)
