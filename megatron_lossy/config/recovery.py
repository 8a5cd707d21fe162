"""Flags of the recovery from losses (docs/semantics.md). :class:`.config.LossyConfig` inherits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..base.flags import check_choice, flag
from ..base.registry import GRAD_RECOVERIES
from ..base.section import Flags


@dataclass(frozen=True)
class RecoveryFlags(Flags):
    """Flags of recovery by owners. Raises :class:`UsageError` for a value not allowed."""

    grad_recovery: str = flag(
        "renormalize",
        "what the owner does about missing gradients: mean of what arrived; that with its own shard weighted 1/N; "
        "the last gradient received from that sender; zeros; or zeros, with what was lost added to what its sender sends "
        "next (docs/smart.md)",
        choices=GRAD_RECOVERIES,
        group="recovery",
        basic=True,
    )
    lossy_self: bool = flag(False, "a worker's own gradient shard can be lost too (the paper's literal formula)")

    @property
    def feeds_back(self) -> bool:
        """Whether senders keep what they lose, and send it again."""
        known = self.grad_recovery in GRAD_RECOVERIES  # it may not be checked yet
        return known and GRAD_RECOVERIES.load(self.grad_recovery).feeds_back

    def check(self) -> None:
        check_choice(self, "grad_recovery")

    def notes(self: Any) -> list[str]:
        return [f"recovery {self.grad_recovery}"] if self.loses("grad") else []

    def idle(self: Any) -> dict[str, tuple[bool, set[str]]]:
        return {"no gradient is lost": (self.loses("grad"), {"grad_recovery", "lossy_self"})}
