"""The lead: parameters that compensate the lag of their own broadcast (docs/lag.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism, Part, Sending
from .flags import LeadFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...recovery import Stale
    from ...transport import LossyGroup, Wire

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
        from ...lab.launch.memory import Kept

        if not held.lost["param"] or config.sends_weights():
            return []
        own = held.compute if held.compute < _FLOAT32 else 0  # a copy of the own shard in fewer bytes
        return [Kept("lead", held.weights / held.shards * (2 * _FLOAT32 + own))]

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        if config.sends_weights():
            return None
        from .part import LeadPart

        return LeadPart()

    @classmethod
    def param_rules(cls, config: LossyConfig, rules: list[Stale], wire: Wire) -> list[Stale]:
        if config.sends_weights() or wire.lossless("param"):
            return rules
        from ...recovery.stale import check_plain
        from .compensated import Compensated
        from .lag import Lag

        check_plain(rules, "--param-send", config.param_send)
        lag = Lag(config, wire)
        return [Compensated(rule.units, rule.rank, lag) for rule in rules]

    @classmethod
    def sending(
        cls, groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]
    ) -> Sending | None:
        from .compensated import Compensated

        if not isinstance(groups[0].params[0], Compensated):
            return None
        from .virtual import Leads

        return Leads(groups, buckets, optimizers)
