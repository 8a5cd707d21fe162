"""Flags of priority: what must arrive of gradients and parameters (docs/smart.md)."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import refuse
from ...flags import check_choice, flag, flag_name, refuse_unused
from ...section import Flags


@dataclass(frozen=True)
class PriorityFlags(Flags):
    """Flags of priority. Raises :class:`UsageError` for a value not allowed."""

    grad_priority: str = flag(
        None,
        "packets of gradients that are delivered whatever is lost: those of the largest mean of absolute values; those whose "
        "mean is above a quantile of single values (the literal rule of SMART); default none, with error-feedback packet-mean",
        choices=("none", "packet-mean", "element-quantile"),
        group="priority",
    )
    grad_priority_fraction: float = flag(
        0.01, "share of the packets, or of the values above the quantile, in [0, 1]", metavar="K"
    )
    grad_priority_scope: str = flag(
        "bucket",
        "what the share is of: all that a rank sends of a bucket, or what it sends of it to each destination",
        choices=("bucket", "destination"),
    )
    grad_priority_sample: int = flag(
        1000, "element-quantile: values that the quantile is taken from, at least 100", metavar="VALUES"
    )
    grad_residual_bound: float = flag(
        1.0,
        "if more than this share of the other packets of a bucket for one destination is lost, all of them are delivered; in "
        "[0, 1]",
        metavar="SHARE",
    )
    param_priority: str = flag(
        "none",
        "packets of parameters that are delivered whatever is lost: those that have changed most since they were last "
        "delivered so, by the mean of absolute values; over UDP and with virtual workers (docs/smart.md)",
        choices=("none", "change"),
    )
    param_priority_fraction: float = flag(
        0.01, "--param-priority: share of the packets that an owner sends of a bucket, in [0, 1]", metavar="K"
    )

    @property
    def at_sender(self) -> bool:
        """Whether senders decide what becomes of their lost gradients."""
        return self.grad_priority != "none" or self.feeds_back

    def chosen(self) -> tuple[str, ...]:
        return ("grad",) * self.at_sender + ("param",) * (self.param_priority != "none")

    def resolve(self) -> None:
        if self.grad_priority is None:
            object.__setattr__(self, "grad_priority", "packet-mean" if self.feeds_back else "none")

    def check(self) -> None:
        for name in ("grad_priority", "grad_priority_scope", "param_priority"):
            check_choice(self, name)
        for name in ("grad_priority_fraction", "grad_residual_bound", "param_priority_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(flag_name(PriorityFlags, name), getattr(self, name), "must be in [0, 1]")
        if self.grad_priority_sample < 100:
            raise refuse("--grad-priority-sample", self.grad_priority_sample, "must be at least 100")
        needs = {
            "grad_residual_bound": (self.at_sender, "--grad-priority"),
            **dict.fromkeys(
                ("grad_priority_fraction", "grad_priority_scope"), (self.grad_priority != "none", "--grad-priority")
            ),
            "grad_priority_sample": (self.grad_priority == "element-quantile", "--grad-priority element-quantile"),
            "param_priority_fraction": (self.param_priority != "none", "--param-priority change"),
        }
        for name, (used, what) in needs.items():
            if not used:
                refuse_unused(self, name, f"needs {what}")

    def notes(self) -> list[str]:
        parts = []
        if self.grad_priority != "none" and self.loses("grad"):
            share = f"{self.grad_priority_fraction:g} of a {self.grad_priority_scope}"
            parts.append(f"priority {self.grad_priority} {share}")
        if self.param_priority != "none" and self.loses("param"):
            parts.append(f"priority of parameters by {self.param_priority} {self.param_priority_fraction:g}")
        return parts

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        codes = self.transport != "udp" or self.at_sender or self.param_priority != "none"
        return {
            "no gradient is lost": (self.loses("grad"), {"grad_priority"}),
            "no parameter is lost": (self.loses("param"), {"param_priority"}),
            "no packet has priority": (codes, {"udp_fec", "udp_fec_budget"}),
        }
