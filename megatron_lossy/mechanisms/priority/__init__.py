"""Priority: what must arrive of gradients and parameters (docs/choosing.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...mechanism import Mechanism
from .flags import PriorityFlags

if TYPE_CHECKING:
    from ...config.refusal import Section
    from ...monitor import Observer


class Priorities(Mechanism):
    """Priority: their place among the mechanisms."""

    name = "priority"
    Flags = PriorityFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import PRIORITY

        return PRIORITY

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.at_sender or run.config.untouched("grad"):
            return []
        from .monitor import PriorityMonitor

        return [PriorityMonitor(lambda: [told for group in run.groups for told in group.told()])]
