"""Flags of priority: what must arrive of gradients (docs/smart.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...base.errors import refuse
from ...base.flags import flag
from ...base.section import Flags

#: Share of the packets, unless the flag gives one.
_SHARE = 0.01
_RULES = ("packet-mean", "element-quantile")


@dataclass(frozen=True)
class PriorityFlags(Flags):
    """Flags of priority. Raises :class:`UsageError` for a value not allowed."""

    triggers = ("grad_recovery", "udp_fec")

    grad_priority: str = flag(
        None,
        "packets of gradients that are delivered whatever is lost: the share K, by default 0.01, of the largest mean of "
        "absolute values; or those whose mean is above the (1 - K) quantile of single values (the literal rule of SMART); "
        "default none, with error-feedback packet-mean",
        metavar="{none,packet-mean[:K],element-quantile[:K]}",
        group="priority",
    )

    @property
    def grad_priority_rule(self) -> tuple[str, float]:
        """The rule of ``--grad-priority``, and K. Raises :class:`UsageError`."""
        name, colon, text = self.grad_priority.partition(":")
        try:
            share = float(text) if colon else _SHARE
        except ValueError:
            share = math.nan
        if name not in ("none", *_RULES) or (colon and (name == "none" or not 0 <= share <= 1)):
            allowed = ", ".join(f"{rule}[:K]" for rule in _RULES)
            raise refuse("--grad-priority", self.grad_priority, f"must be one of none, {allowed}, with K in [0, 1]")
        return name, share

    @property
    def at_sender(self) -> bool:
        """Whether senders decide what becomes of their lost gradients."""
        return self.grad_priority != "none" or self.feeds_back

    def chosen(self) -> tuple[str, ...]:
        """Return the phases whose senders choose units that must arrive."""
        return ("grad",) * self.at_sender

    def resolve(self) -> None:
        if self.grad_priority is None:
            object.__setattr__(self, "grad_priority", "packet-mean" if self.feeds_back else "none")

    def check(self) -> None:
        _ = self.grad_priority_rule

    def notes(self) -> list[str]:
        if self.grad_priority == "none" or not self.loses("grad"):
            return []
        rule, share = self.grad_priority_rule
        return [f"priority {rule} {share:g} of a bucket"]

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        return {
            "no gradient is lost": (self.loses("grad"), {"grad_priority"}),
            "no packet has priority": (self.transport != "udp" or self.at_sender, {"udp_fec"}),
        }
