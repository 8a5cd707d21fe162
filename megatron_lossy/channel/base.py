"""What a channel is: the function that says which units of an exchange arrive (docs/semantics.md).

Pure: NumPy only, no process group, no megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..config import PhaseLoss
from ..exchange import Exchange, Stream
from .draws import PER_BLOCK, Uniforms

#: Blocks of random numbers to draw at once, so that they stay in a core's cache.
PIECE = 2**13


class Channel(ABC):
    """Decides which units of an exchange arrive on a link.

    Implementations are pure functions of their configuration and the arguments: the same at both ends of a link
    and in every process, whatever was asked before. ``together``: all receivers of one sender lose together.
    """

    def __init__(self, loss: PhaseLoss, seed: int, together: bool = False) -> None:
        self.loss = loss
        self.seed = seed
        self.together = together

    @abstractmethod
    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        """bool[units]: True where the unit arrives. ``source`` and ``destination`` are ranks in the full group."""

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """bool[L, units]: :meth:`delivered` of L links, from ``sources`` to ``destinations``, integers [L]."""
        result = np.empty((len(sources), units), dtype=bool)
        for row, source, destination in zip(result, sources, destinations):
            row[:] = self.delivered(exchange, int(source), int(destination), units)
        return result

    def steps(self, phase: str, stream: Stream) -> int | None:
        """How many steps this channel knows, from 0 on; ``None``: any."""
        return None

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        """Raise :class:`UsageError` if this channel cannot serve a group.

        ``size`` ranks exchange ``units`` units per link and step (``None``: not known yet) for ``steps`` steps
        (``None``: not known).
        """


class DrawnChannel(Channel):
    """A channel whose outcomes are drawn, those of many links in one go."""

    @abstractmethod
    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        """As :meth:`delivered_links`, for at most a few thousand links or one with many units."""

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        return self.draw_links(exchange, np.array([source]), np.array([destination]), units)[0]

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        result = np.empty((len(sources), units), dtype=bool)
        links = max(1, PIECE // -(-units // PER_BLOCK))
        for first in range(0, len(sources), links):
            part = slice(first, first + links)
            result[part] = self.draw_links(exchange, sources[part], destinations[part], units)
        return result

    def uniforms(
        self, purpose: int, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> Uniforms:
        """Uniform numbers for the units of links; those of the sender if its receivers lose together."""
        return Uniforms(self.seed, purpose, exchange, sources, None if self.together else destinations, units)
