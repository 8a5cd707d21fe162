"""Losses for good in messages between pipeline stages (SMART, sections 3.1 to 3.3). Pure: NumPy only.

Packets of data and of parity are lost alike. The residual is the packets that the parity does not bring back. Up to a
bound it is lost for good; beyond it the whole message is sent again. Depth decides how much parity a message has, and
its bound: a boundary after l of L layers is high if l/L is at most the depth of ``--act-fec`` (equation 2).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ...base.coding import Layout
from ...base.exchange import Exchange, Stream
from ...channel.bernoulli import Bernoulli
from ...config import LossyConfig, PhaseLoss, Schedule

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

    def _recovery_of(self, boundary: Boundary) -> tuple[tuple[int, int], float] | None:
        """Return B and C of the code, and the share that may be lost, by importance (equation 2), or ``None``."""
        if self._recovery is None:
            return None
        (high, low), depth = self._recovery
        return high if boundary.layer / boundary.layers <= depth else low

    def _layout_of(self, boundary: Boundary, packets: int) -> Layout | None:
        """Return the parity of a message of ``packets``; ``None`` if it has none."""
        recovery = self._recovery_of(boundary)
        return None if recovery is None else _layout(packets, *recovery[0])

    def units(self, boundary: Boundary, packets: int) -> int:
        """Return number of units in the draw for a message of ``packets``: its own, then those of its parity."""
        layout = self._layout_of(boundary, packets)
        return packets if layout is None else packets + layout.parities

    def bound(self, boundary: Boundary, packets: int) -> int:
        """Return packets of a message that may be lost for good."""
        recovery = self._recovery_of(boundary)
        if recovery is None:
            return packets
        _, share = recovery
        return math.floor(share * packets + _ROUNDING)

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
        layout = self._layout_of(boundary, packets)
        residual = raw if layout is None else layout.residual(raw, lost[packets:])
        count = int(residual.sum())
        again = count > self.bound(boundary, packets)
        return Fate(np.zeros_like(residual) if again else residual, int(raw.sum()), count, again)


@functools.lru_cache(maxsize=64)
def _layout(packets: int, block: int, parity: int) -> Layout:
    return Layout(packets, block, parity)
