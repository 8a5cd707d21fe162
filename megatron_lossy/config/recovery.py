"""Flags of the recovery from losses (docs/semantics.md). :class:`.config.LossyConfig` inherits them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import refuse
from ..flags import check_choice, flag, flag_name, refuse_unused
from ..registry import GRAD_RECOVERIES


@dataclass(frozen=True)
class RecoveryFlags:
    """Flags of recovery by owners, senders and receivers. Raises :class:`UsageError` for a value not allowed."""

    grad_recovery: str = flag(
        "renormalize",
        "what the owner does about missing gradients: mean of what arrived; that with its own shard weighted 1/N; "
        "the last gradient received from that sender; zeros; or zeros, with what was lost added to what its sender sends "
        "next (docs/smart.md)",
        choices=GRAD_RECOVERIES,
        group="recovery",
        basic=True,
    )
    grad_priority: str = flag(
        None,
        "packets of gradients that are delivered whatever is lost: those of the largest mean of absolute values; those whose "
        "mean is above a quantile of single values (the literal rule of SMART); default none, with error-feedback packet-mean",
        choices=("none", "packet-mean", "element-quantile"),
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
    param_send: str = flag(
        "plain",
        "what an owner sends: its weights; or its weights with a lead, so that replicas are not late on average "
        "(docs/lag.md)",
        choices=("plain", "compensated"),
        basic=True,
    )
    param_lag: str = flag(
        "auto",
        "compensated: the lead, C0 or C0,R, as E = C0 (W - W before) + R (E before); auto takes it from the loss rates, or "
        "from what receivers count where these are not known",
        metavar="{auto,C0,C0,R}",
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
    lossy_self: bool = flag(False, "a worker's own gradient shard can be lost too (the paper's literal formula)")

    @property
    def at_sender(self) -> bool:
        """Whether senders decide what becomes of their lost gradients."""
        return self.grad_priority != "none" or self.grad_recovery == "error-feedback"

    @property
    def lead(self) -> tuple[float, float] | None:
        """C0 and R of ``--param-lag``, or ``None`` for ``auto``. Raises :class:`UsageError`."""
        if self.param_lag == "auto":
            return None
        try:
            c, r = [float(number) for number in (*self.param_lag.split(","), "0")[:2]]
            if self.param_lag.count(",") > 1 or not (0 <= c < math.inf and 0 <= r < 1):
                raise ValueError
        except ValueError:
            allowed = "must be auto, C0 or C0,R, with C0 finite and at least 0, and R in [0, 1)"
            raise refuse("--param-lag", self.param_lag, allowed) from None
        return c, r

    def resolve_recovery(self) -> None:
        """Give ``--grad-priority`` its default, which depends on the rule. Raises :class:`UsageError`."""
        if self.grad_priority is None:
            feeds_back = self.grad_recovery == "error-feedback"
            object.__setattr__(self, "grad_priority", "packet-mean" if feeds_back else "none")

    def check_recovery(self) -> None:
        """Raise :class:`UsageError` for flags that are not allowed, or that do nothing."""
        for name in ("grad_recovery", "grad_priority", "grad_priority_scope", "param_send", "param_priority"):
            check_choice(self, name)
        _ = self.lead
        for name in ("grad_priority_fraction", "grad_residual_bound", "param_priority_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise refuse(flag_name(RecoveryFlags, name), getattr(self, name), "must be in [0, 1]")
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
