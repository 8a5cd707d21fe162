"""Flags of the lead that owners give to parameters (docs/lag.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...base.errors import refuse
from ...base.flags import flag
from ...base.section import Flags


@dataclass(frozen=True)
class LeadFlags(Flags):
    """Flags of the lead. Raises :class:`UsageError` for a value not allowed."""

    param_send: str = flag(
        "plain",
        "what an owner sends: its weights; or its weights with a lead E, so that replicas are not late on average: "
        "E = C0 (W - W before) + R (E before), with C0 and R from the loss rates, or from what receivers count where these are "
        "not known, unless they are given (docs/lag.md)",
        metavar="{plain,compensated[:C0[,R]]}",
        group="lead",
        basic=True,
    )

    @property
    def lead(self) -> tuple[float, float] | None:
        """The given C0 and R, or ``None``. Raises :class:`UsageError`."""
        name, colon, text = self.param_send.partition(":")
        if name in ("plain", "compensated") and not colon:
            return None
        try:
            c, r = [float(number) for number in (*text.split(","), "0")[:2]]
            if name != "compensated" or text.count(",") > 1 or not (0 <= c < math.inf and 0 <= r < 1):
                raise ValueError
        except ValueError:
            allowed = "must be plain, compensated or compensated:C0[,R], with C0 finite and at least 0, and R in [0, 1)"
            raise refuse("--param-send", self.param_send, allowed) from None
        return c, r

    def check(self) -> None:
        _ = self.lead

    def sends_weights(self) -> bool:
        return self.param_send == "plain"

    def idle(self) -> dict[str, tuple[bool, set[str]]]:
        return {"no parameter is lost": (self.loses("param"), {"param_send"})}

    def notes(self) -> list[str]:
        if self.param_send == "plain" or not self.loses("param"):
            return []
        return [f"parameters sent {self.param_send}"]
