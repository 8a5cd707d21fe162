"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...mechanism import Mechanism
from .flags import LeadFlags

if TYPE_CHECKING:
    from ...config.refusal import Section


class Lead(Mechanism):
    """The lead: their place among the mechanisms."""

    name = "lead"
    Flags = LeadFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import LEAD

        return LEAD
