"""Memory of priorities in training, on one device: computed, not measured."""

from __future__ import annotations

from ...config import LossyConfig
from ...launch.memory import Held, Kept


def kept(config: LossyConfig, held: Held) -> list[Kept]:
    """The parameters that an owner knows to have been delivered."""
    if held.shards == 1 or config.param_priority == "none":
        return []
    return [Kept("parameters delivered for certain", held.weights / held.shards * held.compute)]
