"""Flags that keep full replicas equal (docs/corruption.md)."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from ...base.errors import refuse
from ...base.flags import check_choice, flag, refuse_unused
from ...base.section import Flags

#: The longest interval of ``snr`` and ``divergence``.
LONGEST = 1000


@dataclass(frozen=True)
class ReplicaFlags(Flags):
    """Flags to compare and average replicas. Raises :class:`UsageError` for a value that is not allowed."""

    triggers = ("grad_error",)
    trigger_facts = ("distributed_optimizer", "weight_hash_interval")
    in_headings: ClassVar[bool] = True

    param_sync_interval: int = flag(
        0,
        "updates after which the parameters of full replicas are set to their mean; 0 never; more than the run has: replicas may "
        "drift apart; with a rule other than fixed, the first interval (docs/corruption.md)",
        metavar="H",
        group="full replicas",
        basic=True,
    )
    param_sync_rule: str = flag(
        "fixed",
        "the next interval: always the same; the ratio of gradient to divergence (snr, PAFT-Dyn); or what keeps the divergence "
        "at TAU (0.1), the distance of replicas from their mean in units of its length",
        metavar="{fixed,snr,divergence[:TAU]}",
    )
    param_sync_overlap: bool = flag(
        False, "parameters are averaged during the next forward and backward pass, and applied before the next update"
    )
    param_sync_state: str = flag(
        "params",
        "what is averaged: parameters; or the optimizer's moments too; where all replicas are equal, or most of them, these win, unless "
        "always; with first, replicas are set to the first of them instead",
        choices=("params", "all", "params:first", "all:first", "params:always", "all:always"),
    )
    replica_check: str = flag(
        "none",
        "compare the reduced gradients of full replicas before each update; if they differ: log it; repair them by majority "
        "or mean; or abort",
        choices=("none", "log", "repair", "abort"),
    )

    @property
    def sync_rule(self) -> tuple[str, float]:
        """The rule of ``--param-sync-rule``, and the divergence to aim at. Raises :class:`UsageError`."""
        name, colon, text = self.param_sync_rule.partition(":")
        try:
            tolerance = float(text) if colon else 0.1
        except ValueError:
            tolerance = math.nan
        if name not in ("fixed", "snr", "divergence") or (colon and name != "divergence"):
            raise refuse("--param-sync-rule", self.param_sync_rule, "must be fixed, snr, divergence or divergence:TAU")
        if not 0 < tolerance < math.inf:
            raise refuse("--param-sync-rule", self.param_sync_rule, "TAU must be a finite number above 0")
        return name, tolerance

    @property
    def averages_moments(self) -> bool:
        """Whether the optimizer's moments are averaged too."""
        return self.param_sync_state.startswith("all")

    @property
    def copies_first(self) -> bool:
        """Whether replicas are set to the first of them, not to their mean."""
        return self.param_sync_state.endswith(":first")

    @property
    def averages_always(self) -> bool:
        """Whether replicas are averaged even if all or most are equal."""
        return self.param_sync_state.endswith(":always")

    @property
    def synchronises(self) -> bool:
        """Whether replicas are averaged at all."""
        return self.param_sync_interval > 0

    def check(self) -> None:
        for name in ("param_sync_state", "replica_check"):
            check_choice(self, name)
        if self.param_sync_interval < 0:
            raise refuse("--param-sync-interval", self.param_sync_interval, "must be at least 0")
        _ = self.sync_rule
        if self.sync_rule[0] != "fixed" and self.param_sync_interval > LONGEST:
            raise refuse("--param-sync-interval", self.param_sync_interval, f"must be at most {LONGEST} with this rule")
        for own in () if self.synchronises else fields(ReplicaFlags):
            if own.name.startswith("param_sync_"):
                refuse_unused(self, own.name, "needs --param-sync-interval")

    def drawn_with(self, phase: str) -> Any:
        """Return the flags that exchanges of ``phase`` lose by; the second half of an all-reduce loses as the first.

        Flags of errors and of full replicas then have their defaults.
        """
        if not self.phase(phase).lossless:
            return self
        from ...config.grad_errors import ErrorFlags

        reset: dict[str, Any] = {
            own.name: own.default for section in (ErrorFlags, ReplicaFlags) for own in fields(section)
        }
        grad: dict[str, Any] = {
            "p_param": self.p_grad,
            "loss_model": self.loss_model[:1],
            "loss_schedule": None if self.loss_schedule is None else self.loss_schedule[:1],
        }
        return replace(self, **reset, **grad)

    def acts(self) -> bool:
        return self.synchronises or self.replica_check != "none"

    def needs_whole_optimizers(self) -> bool:
        return self.synchronises or self.replica_check != "none"

    @property
    def drives_apart(self) -> bool:
        """Whether full replicas can receive different gradients: each has errors of its own, or some lose gradients."""
        return self.errs_apart or not self.untouched("grad")

    def notes_beside(self) -> list[str]:
        parts = []
        if self.synchronises:
            what = "parameters and moments" if self.averages_moments else "parameters"
            source = "copied from the first replica" if self.copies_first else "averaged"
            rule = "" if self.sync_rule[0] == "fixed" else f" at first, then by {self.sync_rule[0]}"
            overlap = ", overlapped" if self.param_sync_overlap else ""
            parts.append(f"{what} {source} every {self.param_sync_interval} updates{rule}{overlap}")
        if self.replica_check != "none":
            parts.append(f"gradients of replicas compared: {self.replica_check}")
        return parts
