"""Flags of losses between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import ClassVar

from ...base.errors import refuse
from ...base.flags import as_text, check_choice, check_code, flag, flag_name, in_unit_interval, number, refuse_unused
from ...base.section import Flags

#: Messages between pipeline stages: forward, and backward.
BOUNDARY_PHASES = ("act", "act-grad")
_OF_RECOVERY = ("act_high_depth", "act_fec_high", "act_fec_low")


@dataclass(frozen=True)
class BoundaryFlags(Flags):
    """Flags of losses between stages and their recovery. Raises :class:`UsageError` for a value not allowed."""

    #: The flags that lose parts of messages between stages.
    stage_losses: ClassVar[tuple[str, ...]] = ("--act-transport", "--p-act", "--p-act-grad")

    p_act: float = flag(
        0.0,
        "mean loss rate of activations between pipeline stages, in [0, 1): independent losses of packets, whatever "
        "--loss-model says (docs/boundaries.md)",
        metavar="P",
        group="between pipeline stages",
        basic=True,
    )
    p_act_grad: float = flag(
        0.0, "mean loss rate of gradients of activations between pipeline stages, in [0, 1)", metavar="P", basic=True
    )
    act_transport: str = flag(
        "torch",
        "how messages between pipeline stages cross: as Megatron sends them, minus what --p-act draws; or udp, as datagrams "
        "that may really be lost, with --transport udp (docs/boundaries.md)",
        choices=("torch", "udp"),
    )
    act_packet_bytes: int = flag(
        None,
        "payload bytes of a packet between pipeline stages; default 4096, with --act-transport udp that of --packet-bytes",
        type=int,
        metavar="BYTES",
    )
    act_high_depth: float = flag(
        0.5,
        "boundaries after at most this share of the layers count as high, the others as low; in [0, 1]",
        metavar="SHARE",
    )
    act_fec_high: tuple[float, ...] = flag(
        (100, 34, 0.01),
        "high boundaries: C packets of XOR parity for each B of a message; if more than this share of it, in [0, 1), is lost "
        "after the parity, it is sent again and nothing of it is lost",
        type=number,
        nargs=3,
        metavar=("B", "C", "SHARE"),
    )
    act_fec_low: tuple[float, ...] = flag(
        (100, 10, 0.02), "low boundaries: as --act-fec-high", type=number, nargs=3, metavar=("B", "C", "SHARE")
    )
    act_retransmit: str = flag(
        "on", "off: no parity and nothing is sent again, so that all that is lost becomes zeros", choices=("on", "off")
    )
    act_loss_in_eval: bool = flag(False, "activations are lost in forward passes without gradients, too")
    virtual_boundaries: tuple[int, ...] | None = flag(
        None,
        "with one pipeline stage: lose at the boundaries that stages would have after these decoder layers, counted from 1",
        type=int,
        nargs="+",
        metavar="LAYER",
    )

    def resolve(self) -> None:
        own = self.packet_bytes if self.act_transport == "udp" else 4096
        if self.act_packet_bytes is None and own != "auto":  # which ranks will agree on
            object.__setattr__(self, "act_packet_bytes", own)

    def check(self) -> None:
        for name in ("act_retransmit", "act_transport"):
            check_choice(self, name)
        for name in ("p_act", "p_act_grad"):
            in_unit_interval(flag_name(BoundaryFlags, name), getattr(self, name))
        if not 0 <= self.act_high_depth <= 1:
            raise refuse("--act-high-depth", self.act_high_depth, "must be in [0, 1]")
        if self.act_packet_bytes is not None and self.act_packet_bytes < 1:
            raise refuse("--act-packet-bytes", self.act_packet_bytes, "must be at least 1")
        for name in ("act_fec_high", "act_fec_low"):
            block, parity, share = getattr(self, name)
            if block != int(block) or parity != int(parity) or not 0 <= share < 1:
                allowed = "must be two whole numbers of packets, and a share in [0, 1)"
                raise refuse(flag_name(BoundaryFlags, name), as_text(getattr(self, name)), allowed)
            check_code(flag_name(BoundaryFlags, name), int(block), int(parity))
        layers = self.virtual_boundaries
        if layers is not None and (not layers or min(layers) < 1 or len(set(layers)) < len(layers)):
            raise refuse("--virtual-boundaries", " ".join(map(str, layers)), "must be different layers, from 1 on")
        for name in _OF_RECOVERY if self.act_retransmit == "off" else ():
            refuse_unused(self, name, "does nothing with --act-retransmit off")

    @property
    def loses_at_boundaries(self) -> bool:
        """Whether messages between pipeline stages can lose anything."""
        return self.act_transport == "udp" or any(map(self.boundary_rate, BOUNDARY_PHASES))

    def recovery_of(self, high: bool) -> tuple[tuple[int, int], float]:
        """The code of a boundary, B and C, and the share of a message that may be lost; ``high``: which kind."""
        block, parity, share = self.act_fec_high if high else self.act_fec_low
        return (int(block), int(parity)), share

    def boundary_rate(self, phase: str) -> float:
        """The loss rate of ``phase`` ("act" or "act-grad")."""
        return {"act": self.p_act, "act-grad": self.p_act_grad}[phase]

    def loses_between_stages(self) -> bool:
        """Return whether parts of messages between pipeline stages of real ranks can be lost."""
        return self.loses_at_boundaries and self.virtual_boundaries is None

    def uses_transport(self) -> bool:
        """Return whether messages between stages cross over ``--transport``."""
        return self.act_transport == "udp"

    def changes(self) -> bool:
        return self.loses_at_boundaries

    def draws(self) -> bool:
        return self.loses_at_boundaries

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        of_recovery = {own.name for own in fields(BoundaryFlags)} - {"p_act", "p_act_grad", "act_transport"}
        return {"nothing between stages is lost": (self.loses_at_boundaries, of_recovery)}

    def notes(self) -> list[str]:
        if not self.loses_at_boundaries:
            return []
        rates = f"activations {100 * self.p_act:g} %, their gradients {100 * self.p_act_grad:g} %"
        if self.act_transport == "udp":
            drawn = any(map(self.boundary_rate, BOUNDARY_PHASES))
            rates = "activations and their gradients over UDP" + (f" and, drawn, {rates}" if drawn else "")
        recovery = "without parity"
        if self.act_retransmit == "on":
            kinds = (self.recovery_of(high=True), self.recovery_of(high=False))
            recovery = "parity " + " and ".join(f"{as_text(code)} up to {bound:g}" for code, bound in kinds)
        where = "" if self.virtual_boundaries is None else f" after layers {as_text(self.virtual_boundaries)}"
        return [f"{rates}{where}, {recovery}"]
