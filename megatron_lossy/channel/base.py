"""What a channel is: the function that says which units of an exchange arrive (docs/semantics.md).

Pure: NumPy only, no process group, no megatron.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from ..config import PhaseLoss
from .draws import EVERY_DESTINATION, Uniforms
from .exchange import Exchange, Stream

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

    def draw(self, purpose: int, exchange: Exchange, source: int, destination: int, units: int) -> Uniforms:
        """Uniform numbers for the units of a link; those of the sender if its receivers lose together."""
        receiver = EVERY_DESTINATION if self.together else destination
        return Uniforms(self.seed, purpose, exchange, source, receiver, units)

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        """Raise :class:`UsageError` if this channel cannot serve a group.

        ``size`` ranks exchange ``units`` units per link and step (``None``: not known yet) for ``steps`` steps
        (``None``: not known).
        """
