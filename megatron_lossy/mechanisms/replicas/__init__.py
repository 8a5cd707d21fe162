"""Full replicas: ranks that each have all of the optimizer, and are kept equal (PAFT; docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism
from .flags import ReplicaFlags

if TYPE_CHECKING:
    import pyarrow

    from ...config import LossyConfig
    from ...run.monitor import Observer
    from .full_replicas import FullReplicas


class Replicas(Mechanism):
    """The place of full replicas among the mechanisms."""

    name = "replicas"
    Flags = ReplicaFlags
    table = "megatron_lossy.mechanisms.replicas.refusals:REPLICAS"

    @classmethod
    def attach(cls, run: Any) -> None:
        if run.kind == "Megatron":
            from .ranks import RankReplica

            run.add_part(RankReplica())
        elif run.kind == "DDP":
            from .ddp import DDPReplica

            run.add_part(DDPReplica())

    @classmethod
    def has_events(cls, config: LossyConfig) -> bool:
        return config.needs_whole_optimizers()

    @classmethod
    def event_columns(cls) -> Sequence[pyarrow.Field]:
        import pyarrow as pa

        columns = {"action": pa.string(), "interval": pa.int32(), "divergence": pa.float64()}
        return [pa.field(*column) for column in columns.items()]

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        config = run.config
        if not (config.errs or config.needs_whole_optimizers()):
            return []
        from .monitor import ReplicaMonitor

        def replicas() -> FullReplicas | None:
            part = run.part(cls.name)
            return None if part is None else part.together

        return [ReplicaMonitor(replicas, config.drift_interval)]
