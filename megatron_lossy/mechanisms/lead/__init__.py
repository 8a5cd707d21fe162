"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...mechanism import Mechanism, Part
from .flags import LeadFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...transport import Wire

_FLOAT32 = 4


class Lead(Mechanism):
    """The place of the lead among the mechanisms."""

    name = "lead"
    Flags = LeadFlags

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import LEAD

        return LEAD

    @classmethod
    def memory(cls, config: LossyConfig, held: Any) -> Sequence[Any]:
        from ...launch.memory import Kept

        if not held.lost["param"] or config.sends_weights():
            return []
        own = held.compute if held.compute < _FLOAT32 else 0  # a copy of the own shard in fewer bytes
        return [Kept("lead", held.weights / held.shards * (2 * _FLOAT32 + own))]

    @classmethod
    def part(cls, run: Any) -> Part | None:
        if run.kind != "Megatron" or run.config.sends_weights():
            return None
        from .part import LeadPart

        return LeadPart()

    @classmethod
    def rules(cls, config: LossyConfig, phase: str, rules: list[Any], wire: Wire) -> list[Any]:
        if phase != "param" or config.sends_weights() or wire.lossless("param"):
            return rules
        from ...recovery.stale import check_plain
        from .compensated import Compensated
        from .lag import Lag

        check_plain(rules, "--param-send", config.param_send)
        lag = Lag(config, wire)
        return [Compensated(rule.units, rule.rank, lag) for rule in rules]
