"""Memory of the lead in training, on one device: computed, not measured."""

from __future__ import annotations

from ...config import LossyConfig
from ...launch.memory import Held, Kept

_FLOAT32 = 4


def kept(config: LossyConfig, held: Held) -> list[Kept]:
    """The lead and the weights before, in float32; and a copy of an own shard in fewer bytes."""
    if not held.lost["param"] or config.sends_weights():
        return []
    own = held.compute if held.compute < _FLOAT32 else 0
    return [Kept("lead", held.weights / held.shards * (2 * _FLOAT32 + own))]
