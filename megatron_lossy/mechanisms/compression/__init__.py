"""Coded exchanges: gradients and parameters cross in fewer bytes, and bear loss as before (docs/compression.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...run.mechanism import Mechanism, Part
from .flags import CompressionFlags

if TYPE_CHECKING:
    from ...base.coding.blocks import BlockCode
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...recovery import Stale
    from ...run.monitor import Observer
    from ...transport import Wire


class Compression(Mechanism):
    """The place of coded exchanges among the mechanisms."""

    name = "compression"
    Flags = CompressionFlags
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {
        "wire bytes": ("bytes sent, of gradients and parameters", False),
        "wire rounding": ("error of codes over gradients (sums of squares)", True),
    }

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import COMPRESSION

        return COMPRESSION

    @classmethod
    def codes(cls, config: LossyConfig) -> Mapping[str, BlockCode]:
        from ...base.coding.blocks import BlockCode

        return {phase: BlockCode(bits, config.wire_block) for phase, bits in config.wire_bits.items()}

    @classmethod
    def memory(cls, config: LossyConfig, held: Any) -> Sequence[Any]:
        from ...lab.launch.memory import Kept

        if held.shards == 1 or not config.wire_bits:
            return []
        bits = sum(config.wire_bits.values())
        return [Kept("codes, sent and arrived", 2 * held.weights * bits / 8)]

    @classmethod
    def part(cls, config: LossyConfig, world: Any) -> Part | None:
        if "param" not in config.wire_bits:
            return None
        from .part import CodedParameters

        return CodedParameters()

    @classmethod
    def param_rules(cls, config: LossyConfig, rules: list[Stale], wire: Wire) -> list[Stale]:
        if "param" in wire.coded:
            for rule in rules:
                rule.exact = False
        return rules

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.wire_bits:
            return []
        from .monitor import WireMonitor

        return [WireMonitor(run)]
