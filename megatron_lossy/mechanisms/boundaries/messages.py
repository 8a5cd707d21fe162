"""Messages between pipeline stages: their losses for good (SMART, sections 3.1 to 3.3), and their numbers. Pure: NumPy only.

Packets of data and of parity are lost alike. The residual is the packets that the parity does not bring back. Up to a
bound it is lost for good; beyond it the whole message is sent again. Depth decides how much parity a message has, and
its bound: a boundary after l of L layers is high if l/L is at most the depth of ``--act-fec`` (equation 2).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...base.coding import Layout
from ...base.exchange import Exchange, Stream
from ...channel.bernoulli import Bernoulli
from ...config import LossyConfig, PhaseLoss, Schedule
from ...delivery_log import schema
from .flags import BOUNDARY_PHASES

# Products such as 0.29 x 100 are a little below the exact number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Boundary:
    """The place between two pipeline stages.

    ``stage`` and ``chunk``: pipeline rank and model chunk of the later one. ``layer``: l, decoder layers before it;
    ``layers``: L, decoder layers of the whole model.
    """

    stage: int
    layer: int
    layers: int
    chunk: int = 0

    def stream(self, rank: int) -> Stream:
        """Return the stream of the messages of data-parallel rank ``rank`` at this boundary."""
        return Stream("boundary", expert_rank=rank, stage=self.stage, chunk=self.chunk)


@dataclass(frozen=True)
class Fate:
    """The fate of one message.

    ``lost`` bool[packets]: the packets that are lost for good. ``raw``: number of data packets that the network lost;
    ``residual``: number of these that the parity did not bring back; ``again``: whether the message was sent again for
    them.
    """

    lost: np.ndarray
    raw: int
    residual: int
    again: bool


class BoundaryLoss:
    """The losses of one phase, ``act`` or ``act-grad``: a function of the flags and the arguments alone."""

    def __init__(self, config: LossyConfig, phase: str) -> None:
        self.phase = phase
        self._recovery = config.act_recovery
        rate = config.boundary_rate(phase)
        self.lossless = not rate
        self._channel = Bernoulli(PhaseLoss("bernoulli", Schedule((0,), (rate,))), config.loss_seed)

    def _recovery_of(self, boundary: Boundary, packets: int) -> tuple[Layout | None, int]:
        """Return the parity of a message of ``packets``, if it has any, and :meth:`bound`, by importance (equation 2)."""
        if self._recovery is None:
            return None, packets
        (high, low), depth = self._recovery
        code, share = high if boundary.layer / boundary.layers <= depth else low
        return _layout(packets, *code), math.floor(share * packets + _ROUNDING)

    def units(self, boundary: Boundary, packets: int) -> int:
        """Return number of units in the draw for a message of ``packets``: its own, then those of its parity."""
        layout, _ = self._recovery_of(boundary, packets)
        return packets if layout is None else packets + layout.parities

    def bound(self, boundary: Boundary, packets: int) -> int:
        """Return packets of a message that may be lost for good."""
        return self._recovery_of(boundary, packets)[1]

    def draw(self, boundary: Boundary, rank: int, tensor: int, step: int, units: int) -> np.ndarray:
        """Return bool[units]: the lost units of ``step``, numbered from its first message on.

        ``rank``: data-parallel. ``tensor``: tensor-parallel, or 0 if its peers get the same messages.
        """
        exchange = Exchange(self.phase, boundary.stream(rank), step)
        link = np.array([tensor])
        return ~self._channel.delivered_links(exchange, link, link, units)[0]

    def fate(self, boundary: Boundary, packets: int, lost: np.ndarray) -> Fate:
        """Return the fate of a message of ``packets`` that loses the units ``lost`` bool[units]."""
        raw = lost[:packets]
        layout, bound = self._recovery_of(boundary, packets)
        residual = raw if layout is None else layout.residual(raw, lost[packets:])
        count = int(residual.sum())
        again = count > bound
        return Fate(np.zeros_like(residual) if again else residual, int(raw.sum()), count, again)


_layout = functools.lru_cache(maxsize=64)(Layout)


# --- their numbers, in the order of their arrival --------------------------------------------------------------------


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
