"""Coded exchanges: gradients and parameters cross in fewer bytes, and bear loss as before (docs/compression.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...run.mechanism import Mechanism
from .flags import CompressionFlags

if TYPE_CHECKING:
    from ...config import LossyConfig
    from ...run.monitor import Observer
    from ...transport import Wire


class Compression(Mechanism):
    """The place of coded exchanges among the mechanisms."""

    name = "compression"
    Flags = CompressionFlags
    table = "megatron_lossy.mechanisms.compression.refusals:COMPRESSION"

    @classmethod
    def attach(cls, run: Any) -> None:
        if run.kind == "Megatron" and "param" in run.config.wire_bits:
            run.events.on(save_begins=run.settle)  # replicas are saved as they arrived, in whole

    @classmethod
    def rules(cls, config: LossyConfig, phase: str, rules: list[Any], wire: Wire) -> list[Any]:
        if phase == "param" and "param" in wire.coded:
            for rule in rules:
                rule.exact = False
        return rules

    @classmethod
    def observers(cls, run: Any, writer: int | None) -> Sequence[Observer]:
        if not run.config.wire_bits:
            return []
        from .monitor import WireMonitor

        return [WireMonitor(run)]
