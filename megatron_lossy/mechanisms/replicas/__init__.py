"""Full replicas: ranks that each have all of the optimizer, and are kept equal (PAFT; docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...mechanism import Mechanism, Part
from .flags import ReplicaFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...monitor import Observer


class Replicas(Mechanism):
    """Full replicas: their place among the mechanisms."""

    name = "replicas"
    Flags = ReplicaFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import REPLICAS

        return REPLICAS

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        from .part import FullReplica

        return FullReplica()

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        config = run.config
        if not (config.errs or config.needs_whole_optimizers()):
            return []
        from .monitor import ReplicaMonitor

        return [ReplicaMonitor(lambda: run.full_replicas, config.drift_interval)]
