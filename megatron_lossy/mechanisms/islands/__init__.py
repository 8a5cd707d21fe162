"""Islands: complete training jobs that exchange some of their parameters, late (AsyncMesh, section 4; docs/islands.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from ...mechanism import Mechanism, Part
from .flags import IslandFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section


class Islands(Mechanism):
    """Islands: their place among the mechanisms."""

    name = "islands"
    Flags = IslandFlags
    phases: ClassVar[Mapping[str, int]] = {"sync-reduce": 4, "sync-gather": 5}

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import ISLANDS

        return ISLANDS

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        if world is None:
            return None
        from .part import TrainingIslands

        return TrainingIslands(config, world)
