"""Refusals of the lead that owners give to parameters (docs/lag.md)."""

from __future__ import annotations

from ...config.refusal import Section
from ...config.refusals.core import NO_PARAMETERS

LEAD = Section(
    "lead",
    "Lead of parameters",
    f"--param-send | lost gradients and no distributed optimizer | {NO_PARAMETERS}",
    lambda c, f: f.distributed_optimizer is False and not c.sends_weights() and not c.untouched("grad"),
)
