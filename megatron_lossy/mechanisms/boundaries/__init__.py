"""Lossy boundaries between pipeline stages: packets that are lost for good become zeros (SMART, APNet 2026; docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...mechanism import Mechanism, Part
from .flags import BoundaryFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...monitor import Observer


class Boundaries(Mechanism):
    """The place of boundaries between pipeline stages among the mechanisms."""

    name = "boundaries"
    Flags = BoundaryFlags
    phases: ClassVar[Mapping[str, int]] = {"act": 2, "act-grad": 3}

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import BOUNDARIES

        return BOUNDARIES

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        if not config.loses_at_boundaries:
            return None
        from .part import StageBoundaries

        return StageBoundaries()

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.loses_at_boundaries:
            return []
        from .log import BoundaryLog
        from .monitor import BoundaryMonitor

        log = [] if run.config.delivery_log is None else [BoundaryLog(run.config, writer)]
        return [BoundaryMonitor(), *log]
