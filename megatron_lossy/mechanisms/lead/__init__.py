"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...mechanism import Mechanism
from .flags import LeadFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section


class Lead(Mechanism):
    """The lead: their place among the mechanisms."""

    name = "lead"
    Flags = LeadFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import LEAD

        return LEAD

    @classmethod
    def memory(cls, config: LossyConfig, device: Any) -> Sequence[Any]:
        from .memory import kept

        return kept(config, device)
