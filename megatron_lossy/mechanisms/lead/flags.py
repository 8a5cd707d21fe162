"""Flags of the lead that owners give to parameters (docs/lag.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...errors import refuse
from ...flags import check_choice, flag
from ...section import Flags


@dataclass(frozen=True)
class LeadFlags(Flags):
    """Flags of the lead. Raises :class:`UsageError` for a value not allowed."""

    param_send: str = flag(
        "plain",
        "what an owner sends: its weights; or its weights with a lead, so that replicas are not late on average "
        "(docs/lag.md)",
        choices=("plain", "compensated"),
        group="lead",
        basic=True,
    )
    param_lag: str = flag(
        "auto",
        "compensated: the lead, C0 or C0,R, as E = C0 (W - W before) + R (E before); auto takes it from the loss rates, or "
        "from what receivers count where these are not known",
        metavar="{auto,C0,C0,R}",
    )

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

    def check(self) -> None:
        check_choice(self, "param_send")
        _ = self.lead

    def sends_weights(self) -> bool:
        return self.param_send == "plain"

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        return {"no parameter is lost": (self.loses("param"), {"param_send"})}

    def notes(self) -> list[str]:
        if self.param_send == "plain" or not self.loses("param"):
            return []
        return [f"parameters sent {self.param_send}, lag {self.param_lag}"]
