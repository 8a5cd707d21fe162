"""What a run tells about itself, and where to."""

from __future__ import annotations

from ..config import LossyConfig
from .observation import Observation, Observer

__all__ = ["Observation", "Observer", "make_observers"]


def make_observers(config: LossyConfig) -> list[Observer]:
    """The observers that the flags ask for."""
    return []
