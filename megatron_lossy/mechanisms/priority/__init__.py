"""Priority: what must arrive of gradients (docs/choosing.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism
from .flags import PriorityFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...run.monitor import Observer
    from ...transport import Wire


class Priorities(Mechanism):
    """The place of priority among the mechanisms."""

    name = "priority"
    Flags = PriorityFlags
    table = "megatron_lossy.mechanisms.priority.refusals:PRIORITY"

    @classmethod
    def rules(cls, config: LossyConfig, phase: str, rules: list[Any], wire: Wire) -> list[Any]:
        if phase != "grad" or not config.at_sender:
            return rules
        from .protected import protected_rules

        return protected_rules(config, rules, wire)

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.at_sender or run.config.untouched("grad"):
            return []
        from .protected import PriorityMonitor

        return [PriorityMonitor(lambda: [told for group in run.groups for told in group.told()])]
