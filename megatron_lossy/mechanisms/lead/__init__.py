"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism
from .flags import LeadFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...transport import Wire


class Lead(Mechanism):
    """The place of the lead among the mechanisms."""

    name = "lead"
    Flags = LeadFlags

    @classmethod
    def attach(cls, run: Any) -> None:
        if run.kind == "Megatron" and not run.config.sends_weights():
            from .part import LeadPart

            run.add_part(LeadPart())

    @classmethod
    def rules(cls, config: LossyConfig, phase: str, rules: list[Any], wire: Wire) -> list[Any]:
        if phase != "param" or config.sends_weights() or wire.lossless("param"):
            return rules
        from ...base.errors import refuse
        from ...recovery import Stale
        from .compensated import Compensated
        from .lag import Lag

        if others := {type(rule) for rule in rules} - {Stale}:
            why = f"another mechanism has put {others.pop().__qualname__} in the place of its rule"
            raise refuse("--param-send", config.param_send, why)
        lag = Lag(config, wire)
        return [Compensated(rule.units, rule.rank, lag) for rule in rules]
