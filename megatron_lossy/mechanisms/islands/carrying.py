"""Carriers of exchanges between ranks of one number of all islands, in host memory; this module has that over gloo, of one launch."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from .world import Meeting


class Carrier(ABC):
    """Carries one exchange after the other between the islands, in host memory."""

    #: Whether it reports losses.
    observes = False

    @abstractmethod
    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Send ``pieces`` [M, n], one to each island. Returns the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units or more]; ``None``: all. Items that did not arrive are zero.
        """

    @abstractmethod
    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """[M, n]: ``own`` [n] of every island, and the units that arrived as in :meth:`scatter`."""

    def close(self) -> None:
        """Close the carrier after the last exchange."""


class Collectives(Carrier):
    """Exchanges over torch among all islands of ``meeting``."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return self._meeting.all_to_all(pieces), None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return self._meeting.all_gather(own), None
