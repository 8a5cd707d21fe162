"""Lossy boundaries between pipeline stages: packets that are lost for good become zeros (SMART, APNet 2026; docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...run.mechanism import Mechanism
from .flags import BoundaryFlags

if TYPE_CHECKING:
    from ...delivery_log.events import Kinds
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
        from .events import BoundaryMonitor

        return [BoundaryMonitor()]

    @classmethod
    def kinds(cls) -> type[Kinds]:
        from .events import BoundaryEvents

        return BoundaryEvents
