"""A place where launches find each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

#: What one says of itself: what JSON can hold.
Data = Mapping[str, Any]


class Unreachable(RuntimeError):
    """Nobody answers, for now."""


class Rendezvous(ABC):
    """A place where launches find each other. ``timeout``: seconds after which one that is silent counts as dead."""

    timeout: float

    @abstractmethod
    def ask(self, step: int, data: Data) -> list[Data]:
        """Say ``data`` of oneself; returns what each that is alive says, oneself too, in no order.

        ``step``: rises with what has been done. Whoever asks at about the same time gets the same answer. It comes once all that
        are alive have asked, and so it may take until a death is noticed. Raises :class:`Unreachable`.
        """

    @abstractmethod
    def close(self) -> None:
        """Be heard no more: the others need not wait until a death is noticed."""
