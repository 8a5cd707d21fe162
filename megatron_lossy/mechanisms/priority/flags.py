"""Flags of priority: what must arrive of gradients and parameters (docs/smart.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...base.errors import refuse
from ...base.flags import flag
from ...base.section import Flags

#: Share of the packets, unless the flag gives one.
_SHARE = 0.01


@dataclass(frozen=True)
class PriorityFlags(Flags):
    """Flags of priority. Raises :class:`UsageError` for a value not allowed."""

    grad_priority: str = flag(
        None,
        "packets of gradients that are delivered whatever is lost: the share K, by default 0.01, of the largest mean of "
        "absolute values; or those whose mean is above the (1 - K) quantile of single values (the literal rule of SMART); "
        "default none, with error-feedback packet-mean",
        metavar="{none,packet-mean[:K],element-quantile[:K]}",
        group="priority",
    )
    param_priority: str = flag(
        "none",
        "packets of parameters that are delivered whatever is lost: the share K, by default 0.01, of what an owner sends of a "
        "bucket that has changed most since it was last delivered so, by the mean of absolute values; over UDP and with "
        "virtual workers (docs/smart.md)",
        metavar="{none,change[:K]}",
    )

    @property
    def grad_priority_rule(self) -> tuple[str, float]:
        """The rule of ``--grad-priority``, and K. Raises :class:`UsageError`."""
        return _rule("--grad-priority", self.grad_priority, ("packet-mean", "element-quantile"))

    @property
    def param_priority_rule(self) -> tuple[str, float]:
        """The rule of ``--param-priority``, and K. Raises :class:`UsageError`."""
        return _rule("--param-priority", self.param_priority, ("change",))

    @property
    def at_sender(self) -> bool:
        """Whether senders decide what becomes of their lost gradients."""
        return self.grad_priority != "none" or self.feeds_back

    def chosen(self) -> tuple[str, ...]:
        """Return the phases whose senders choose units that must arrive."""
        return ("grad",) * self.at_sender + ("param",) * (self.param_priority != "none")

    def resolve(self) -> None:
        if self.grad_priority is None:
            object.__setattr__(self, "grad_priority", "packet-mean" if self.feeds_back else "none")

    def check(self) -> None:
        _ = self.grad_priority_rule, self.param_priority_rule

    def notes(self) -> list[str]:
        parts = []
        if self.grad_priority != "none" and self.loses("grad"):
            rule, share = self.grad_priority_rule
            parts.append(f"priority {rule} {share:g} of a bucket")
        if self.param_priority != "none" and self.loses("param"):
            rule, share = self.param_priority_rule
            parts.append(f"priority of parameters by {rule} {share:g}")
        return parts

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        codes = self.transport != "udp" or self.at_sender or self.param_priority != "none"
        return {
            "no gradient is lost": (self.loses("grad"), {"grad_priority"}),
            "no parameter is lost": (self.loses("param"), {"param_priority"}),
            "no packet has priority": (codes, {"udp_fec"}),
        }


def _rule(flag: str, value: str, rules: tuple[str, ...]) -> tuple[str, float]:
    name, colon, text = value.partition(":")
    try:
        share = float(text) if colon else _SHARE
    except ValueError:
        share = math.nan
    if name not in ("none", *rules) or (colon and (name == "none" or not 0 <= share <= 1)):
        allowed = ", ".join(f"{rule}[:K]" for rule in rules)
        raise refuse(flag, value, f"must be one of none, {allowed}, with K in [0, 1]")
    return name, share
