"""Refusals of the lead that owners give to parameters (docs/lag.md)."""

from __future__ import annotations

from ...config.refusal import Section
from ...config.refusals.row import NO_PARAMETERS, Row

LEAD = Section(
    "lead",
    "Lead of parameters",
    (
        Row(
            flag=("--param-send",),
            beside="lost gradients and no distributed optimizer",
            why=NO_PARAMETERS,
            when=lambda config, facts: facts.distributed_optimizer is False and not config.untouched("grad"),
        ),
    ),
)
