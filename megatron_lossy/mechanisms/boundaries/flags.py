"""Flags of losses between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ...base.errors import refuse
from ...base.flags import as_text, check_code, flag, flag_name, in_unit_interval
from ...base.section import Flags

#: Messages between pipeline stages: forward, and backward.
BOUNDARY_PHASES = ("act", "act-grad")


@dataclass(frozen=True)
class BoundaryFlags(Flags):
    """Flags of losses between stages and their recovery. Raises :class:`UsageError` for a value not allowed."""

    #: The flags that lose parts of messages between stages.
    stage_losses: ClassVar[tuple[str, ...]] = ("--p-act", "--p-act-grad")

    p_act: float = flag(
        0.0,
        "mean loss rate of activations between pipeline stages, in [0, 1): independent losses of packets, whatever "
        "--loss-model says (docs/boundaries.md)",
        metavar="P",
        group="between pipeline stages",
        basic=True,
    )
    p_act_grad: float = flag(
        0.0, "mean loss rate of gradients of activations between pipeline stages, in [0, 1)", metavar="P"
    )
    act_fec: tuple[str, ...] = flag(
        ("100,34,0.01", "100,10,0.02", "0.5"),
        "parity of messages over high boundaries and over low ones: C packets of XOR parity for each B; if more than SHARE of a "
        "message, in [0, 1), is lost after it, the message is sent again and nothing of it is lost; boundaries after at most "
        "DEPTH of the layers, in [0, 1], are high; off: no parity and nothing is sent again, so that all that is lost becomes zeros",
        metavar="B,C,SHARE B,C,SHARE DEPTH | off",
    )
    act_loss_in_eval: bool = flag(False, "activations are lost in forward passes without gradients, too")
    virtual_boundaries: tuple[int, ...] | None = flag(
        None,
        "with one pipeline stage: lose at the boundaries that stages would have after these decoder layers, counted from 1",
        metavar="LAYER",
    )

    def check(self) -> None:
        for name in ("p_act", "p_act_grad"):
            in_unit_interval(flag_name(BoundaryFlags, name), getattr(self, name))
        _ = self.act_recovery
        layers = self.virtual_boundaries
        if layers is not None and (not layers or min(layers) < 1 or len(set(layers)) < len(layers)):
            raise refuse("--virtual-boundaries", " ".join(map(str, layers)), "must be different layers, from 1 on")

    @property
    def loses_at_boundaries(self) -> bool:
        """Whether messages between pipeline stages can lose anything."""
        return any(map(self.boundary_rate, BOUNDARY_PHASES))

    @property
    def act_recovery(self) -> tuple[list[tuple[tuple[int, int], float]], float] | None:
        """``--act-fec``: B and C, and the share that may be lost, of high and of low boundaries; and the depth.

        ``None`` if it is off. Raises :class:`UsageError`.
        """
        if self.act_fec == ("off",):
            return None
        kinds = []
        try:
            *texts, depth = self.act_fec
            for text in texts:
                block, parity, share = text.split(",")
                kinds.append(((int(block), int(parity)), float(share)))
            if len(kinds) != 2 or not all(0 <= share < 1 for _, share in kinds) or not 0 <= float(depth) <= 1:
                raise ValueError
        except ValueError:
            allowed = "must be off, or B,C,SHARE of high and of low boundaries and DEPTH, with SHARE in [0, 1), DEPTH in [0, 1]"
            raise refuse("--act-fec", as_text(self.act_fec), allowed) from None
        for code, _ in kinds:
            check_code("--act-fec", *code)
        return kinds, float(depth)

    def boundary_rate(self, phase: str) -> float:
        """Return the loss rate of ``phase`` ("act" or "act-grad")."""
        return {"act": self.p_act, "act-grad": self.p_act_grad}[phase]

    def loses_between_stages(self) -> bool:
        """Return whether parts of messages between pipeline stages of real ranks can be lost."""
        return self.loses_at_boundaries and self.virtual_boundaries is None

    def changes(self) -> bool:
        return self.loses_at_boundaries

    def draws(self) -> bool:
        return self.loses_at_boundaries

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        of_recovery = {own.name for own in fields(BoundaryFlags)} - {"p_act", "p_act_grad"}
        return {
            "nothing between stages is lost": (self.loses_at_boundaries, of_recovery),
            f"the unit of loss is a {self.loss_unit}": (self.loses_at_boundaries, {"packet_bytes"}),
        }

    def notes(self) -> list[str]:
        if not self.loses_at_boundaries:
            return []
        rates = f"activations {100 * self.p_act:g} %, their gradients {100 * self.p_act_grad:g} %"
        recovery = "without parity"
        if self.act_recovery is not None:
            kinds, _ = self.act_recovery
            recovery = "parity " + " and ".join(f"{as_text(code)} up to {bound:g}" for code, bound in kinds)
        where = "" if self.virtual_boundaries is None else f" after layers {as_text(self.virtual_boundaries)}"
        return [f"{rates}{where}, {recovery}"]
