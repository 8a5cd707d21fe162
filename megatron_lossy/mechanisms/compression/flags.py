"""Flags of coded exchanges (docs/compression.md)."""

from __future__ import annotations

from dataclasses import dataclass

from ...base.flags import check_choice, flag
from ...base.section import Flags

_BITS = {"int8": 8, "int4": 4}


@dataclass(frozen=True)
class CompressionFlags(Flags):
    """Flags of codes. Raises :class:`UsageError` for a value not allowed."""

    triggers = ("sync_dtype",)

    grad_wire: str = flag(
        "raw",
        "how gradients cross: as they are, or in whole numbers of 8 or 4 bits with a scale for each block, rounded at random so "
        "that the mean is right; on ranks over --transport pieces, udp or stream (docs/compression.md)",
        choices=("raw", "int8", "int4"),
        group="fewer bytes",
    )
    param_wire: str = flag(
        "raw",
        "how parameters cross: as they are, or in whole numbers of 8 bits, rounded to nearest; owners compute, evaluate and save "
        "the weights before",
        choices=("raw", "int8"),
    )
    wire_block: int = flag(
        128, "elements that share a scale; fewer round less, and take more bytes", choices=(32, 64, 128, 256)
    )

    @property
    def wire_bits(self) -> dict[str, int]:
        """Bits of an element, by phase that crosses in codes."""
        wanted = {"grad": self.grad_wire, "param": self.param_wire}
        return {phase: _BITS[name] for phase, name in wanted.items() if name != "raw"}

    def check(self) -> None:
        for name in ("grad_wire", "param_wire", "wire_block"):
            check_choice(self, name)

    def draws(self) -> bool:
        return "grad" in self.wire_bits

    def notes(self) -> list[str]:
        words = {"grad": f"gradients in {self.grad_wire}", "param": f"parameters in {self.param_wire}"}
        return [f"{words[phase]}, blocks of {self.wire_block}" for phase in self.wire_bits]

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        return {"nothing crosses in codes": (bool(self.wire_bits or self.sync_bits), {"wire_block"})}
