"""Numbers the messages of a step in the order of their arrival. Pure: NumPy only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...base.exchange import Stream
from ...config import LossyConfig
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
    """A message that arrived: number ``number`` of its stream since the schedule began, from 0.

    ``step``: attempted iteration. ``rank``: data-parallel. ``tensor``: tensor-parallel, ``None`` if its peers lose the
    same packets. ``evaluation``: whether its schedule is one of an evaluation.
    """

    phase: str
    boundary: Boundary
    rank: int
    tensor: int | None
    step: int
    number: int
    evaluation: bool

    @property
    def stream(self) -> Stream:
        """The stream of the message."""
        return replace(self.boundary.stream(self.rank), tensor=self.tensor)


@dataclass
class _Draw:
    """The draw for a step of one stream: ``lost`` bool[units], and ``used``, the number of units that messages took."""

    lost: np.ndarray
    used: int = 0


class Messages:
    """The messages that a process receives. The units of a step are numbered on from message to message of a stream.

    A boundary's messages arrive in the order of the micro-batches, in both directions.
    """

    def __init__(self, config: LossyConfig) -> None:
        self.loss = {phase: BoundaryLoss(config, phase) for phase in BOUNDARY_PHASES}
        self._step = -1
        self._expected = 1
        self._drawn: dict[tuple[str, Stream, int], _Draw] = {}
        self._numbers: dict[tuple[str, Stream, int | None], int] = {}

    def begin(self, step: int, expected: int = 1) -> None:
        """Begin a schedule in attempted iteration ``step``. ``expected``: messages of each boundary, if these are
        alike.

        A schedule that is run again in a step loses the same units.
        """
        self._step, self._expected = step, expected
        self._drawn.clear()
        self._numbers.clear()

    def identify(
        self, phase: str, boundary: Boundary, rank: int, tensor: int | None, step: int, evaluation: bool
    ) -> Message:
        """Return the next message at ``boundary``. Call it once for each message, in the order of their arrival."""
        if step != self._step:
            self.begin(step)
        key = (phase, boundary.stream(rank), tensor)
        number = self._numbers.get(key, 0)
        self._numbers[key] = number + 1
        return Message(phase, boundary, rank, tensor, step, number, evaluation)

    def next(self, phase: str, boundary: Boundary, rank: int, tensor: int, step: int, packets: int) -> Fate:
        """Return the fate of the next message of ``packets`` at ``boundary``; see :meth:`BoundaryLoss.draw`."""
        return self.loss[phase].fate(boundary, packets, self.lost(phase, boundary, rank, tensor, step, packets))

    def lost(self, phase: str, boundary: Boundary, rank: int, tensor: int, step: int, packets: int) -> np.ndarray:
        """Return bool[units]: the units that the draw loses of the next message, its packets and then its parity."""
        if step != self._step:
            self.begin(step)
        loss = self.loss[phase]
        units = loss.units(boundary, packets)
        key = (phase, boundary.stream(rank), tensor)
        drawn = self._drawn.setdefault(key, _Draw(np.empty(0, dtype=bool)))
        first, drawn.used = drawn.used, drawn.used + units
        if drawn.used > len(drawn.lost):
            # A longer draw begins with the same units.
            wanted = max(drawn.used, self._expected * units, 2 * len(drawn.lost))
            drawn.lost = loss.draw(boundary, rank, tensor, step, wanted)
        return drawn.lost[first : drawn.used]
