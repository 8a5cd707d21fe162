"""Lossy boundaries between pipeline stages: packets that are lost for good become zeros (SMART, APNet 2026; docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ...run.mechanism import Mechanism, Part
from .flags import BoundaryFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...delivery_log.reader import DeliveryLogFolder
    from ...delivery_log.verdict import Verdict
    from ...run.monitor import Observer


class Boundaries(Mechanism):
    """The place of boundaries between pipeline stages among the mechanisms."""

    name = "boundaries"
    Flags = BoundaryFlags
    phases: ClassVar[Mapping[str, int]] = {"act": 2, "act-grad": 3}
    patched: ClassVar[Mapping[str, Any]] = {"p_act": 0.1}
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {
        "loss rate act": ("share of packets of activations lost", False),
        "loss rate act-grad": ("share of packets of their gradients lost", False),
        "zero share act": ("share of packets of activations that became zeros", False),
        "zero share act-grad": ("share of packets of their gradients that became zeros", False),
        "retransmitted share act": ("share of messages of activations sent again", False),
        "retransmitted share act-grad": ("share of messages of their gradients sent again", False),
    }

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
    def virtual_part(cls, config: LossyConfig) -> Part | None:
        if not config.loses_at_boundaries:
            return None
        from .part import VirtualBoundaries

        return VirtualBoundaries()

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.loses_at_boundaries:
            return []
        from .log import BoundaryLog
        from .monitor import BoundaryMonitor

        log = [] if run.config.delivery_log is None else [BoundaryLog(run.config, writer)]
        return [BoundaryMonitor(), *log]

    @classmethod
    def log_summary(cls, folder: Path) -> list[str]:
        from .summary import summary_lines

        return summary_lines(folder)

    @classmethod
    def verify_log(cls, folder: DeliveryLogFolder, verdict: Verdict) -> None:
        from .verify import verify_boundaries

        verify_boundaries(folder, verdict)
