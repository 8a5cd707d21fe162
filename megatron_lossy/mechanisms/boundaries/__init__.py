"""Lossy boundaries between pipeline stages: packets that are lost for good become zeros (SMART, APNet 2026; docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...run.mechanism import Mechanism
from .flags import BoundaryFlags

if TYPE_CHECKING:
    import pyarrow

    from ...config import LossyConfig
    from ...run.monitor import Observer


class Boundaries(Mechanism):
    """The place of boundaries between pipeline stages among the mechanisms."""

    name = "boundaries"
    Flags = BoundaryFlags
    table = "megatron_lossy.mechanisms.boundaries.refusals:BOUNDARIES"
    phases: ClassVar[Mapping[str, int]] = {"act": 2, "act-grad": 3}

    @classmethod
    def attach(cls, run: Any) -> None:
        if run.kind in ("Megatron", "virtual") and run.config.loses_at_boundaries:
            from .hooks import StageBoundaries

            run.add_part(StageBoundaries())

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.loses_at_boundaries:
            return []
        from .hooks import BoundaryMonitor

        return [BoundaryMonitor()]

    @classmethod
    def has_events(cls, config: LossyConfig) -> bool:
        return config.loses_at_boundaries

    @classmethod
    def event_columns(cls) -> Sequence[pyarrow.Field]:
        import pyarrow as pa

        return [
            *(pa.field(name, pa.int32()) for name in ("message", "packets", "lost", "repaired")),
            pa.field("again", pa.bool_()),
            pa.field("zeros", pa.int32()),
            pa.field("bitmap", pa.binary()),
            *(pa.field(name, pa.int32()) for name in ("layer", "layers")),
        ]
