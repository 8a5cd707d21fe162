"""The observers that hear of messages between pipeline stages, beside the events of every run."""

from __future__ import annotations

from ...monitor.observer import Observer
from .loss import Fate
from .messages import Message


class BoundaryObserver(Observer):
    """Receives messages between pipeline stages, too."""

    def crossed(self, message: Message, fate: Fate) -> None:
        """Called at once when a lossy message has arrived. ``fate``: its losses."""
