"""Flags of errors in reduced gradients (docs/corruption.md). :class:`.config.LossyConfig` inherits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base.errors import refuse
from ..base.flags import as_text, check_choice, flag, number, refuse_unused
from ..base.registry import GRAD_ERRORS
from ..base.section import Flags


@dataclass(frozen=True)
class ErrorFlags(Flags):
    """Flags of errors in reduced gradients. Raises :class:`UsageError` for a value that is not allowed."""

    in_headings: ClassVar[bool] = True

    grad_error: str = flag(
        "none",
        "what happens to a reduced gradient: nothing; Gaussian noise, STD its standard deviation in units of the gradient that the "
        "optimizer sees; flipped bits, one in each of K elements of a stream (1), "
        "among the bits LOW to HIGH, from 0, the lowest of the mantissa (all) (docs/corruption.md)",
        metavar="{none,gaussian[:STD],bit-flip[:K[,LOW,HIGH]]}",
        group="errors in gradients",
        basic=True,
    )
    grad_error_relative: float | None = flag(
        None,
        "gaussian: standard deviation in units of the root mean square of the bucket's gradient; in the place of "
        "STD; with 1 the error is as long as the gradient",
        type=float,
        metavar="R",
    )
    grad_error_rate: float = flag(
        1.0, "probability that the error happens, per iteration, rank and stream; in [0, 1]", metavar="P"
    )
    grad_error_burst: tuple[float, ...] | None = flag(
        None,
        "gaussian: in every N-th iteration STD replaces the standard deviation, in the same unit as that of --grad-error or "
        "--grad-error-relative, which may be 0 then",
        type=number,
        nargs=2,
        metavar=("N", "STD"),
    )
    grad_error_at: str = flag(
        "broadcast",
        "broadcast: each rank has errors of its own, which needs full replicas; reduce: the reduction itself is wrong, with "
        "the distributed optimizer at each owner's shard, otherwise in the same way at all ranks",
        choices=("broadcast", "reduce"),
    )
    grad_error_ranks: tuple[int, ...] | None = flag(
        None,
        "ranks of the data-parallel group that errors can hit; default all",
        type=int,
        nargs="+",
        metavar="RANK",
    )

    @property
    def error_kind(self) -> str:
        """The name of the errors."""
        return self.grad_error.partition(":")[0]

    @property
    def grad_error_std(self) -> float | None:
        """STD of ``gaussian``, if it is given. Raises :class:`UsageError`."""
        kind, _, text = self.grad_error.partition(":")
        try:
            return float(text) if kind == "gaussian" and text else None
        except ValueError:
            raise refuse("--grad-error", self.grad_error, "must be gaussian or gaussian:STD") from None

    @property
    def flips(self) -> tuple[int, tuple[int, int] | None]:
        """K of ``bit-flip``, and LOW and HIGH if they are given. Raises :class:`UsageError`."""
        if self.error_kind != "bit-flip":
            return 1, None
        try:
            count, *bits = map(int, (self.grad_error.partition(":")[2] or "1").split(","))
        except ValueError:
            count, bits = 0, []
        if count < 1 or len(bits) not in (0, 2):
            raise refuse(
                "--grad-error",
                self.grad_error,
                "must be bit-flip, bit-flip:K or bit-flip:K,LOW,HIGH, with K at least 1",
            )
        return count, (bits[0], bits[1]) if bits else None

    @property
    def errs(self) -> bool:
        """Whether a reduced gradient can have errors."""
        return self.error_kind != "none" and self.grad_error_rate > 0

    def check(self) -> None:
        if self.error_kind not in GRAD_ERRORS or (
            ":" in self.grad_error and self.error_kind not in ("bit-flip", "gaussian")
        ):
            raise refuse("--grad-error", self.grad_error, "must be one of " + ", ".join(GRAD_ERRORS))
        check_choice(self, "grad_error_at")
        if not 0 <= self.grad_error_rate <= 1:  # NaN fails too
            raise refuse("--grad-error-rate", self.grad_error_rate, "must be in [0, 1]")
        ranks = self.grad_error_ranks
        if ranks is not None and (not ranks or min(ranks) < 0 or len(set(ranks)) < len(ranks)):
            raise refuse("--grad-error-ranks", as_text(ranks), "must be different ranks, from 0 on")
        for name in ("grad_error_rate", "grad_error_at", "grad_error_ranks") if self.error_kind == "none" else ():
            refuse_unused(self, name, "needs --grad-error gaussian or bit-flip, not none")
        for name in ("grad_error_relative", "grad_error_burst") if self.error_kind != "gaussian" else ():
            refuse_unused(self, name, f"needs --grad-error gaussian, not {self.error_kind}")
        GRAD_ERRORS.load(self.error_kind).check(self)

    @property
    def errs_apart(self) -> bool:
        """Whether each rank has errors of its own."""
        return self.errs and self.grad_error_at == "broadcast"

    def needs_whole_optimizers(self) -> bool:
        return self.errs_apart

    def acts(self) -> bool:
        return self.errs

    def notes_beside(self) -> list[str]:
        if not self.errs:
            return []
        rate = "" if self.grad_error_rate == 1 else f" in {100 * self.grad_error_rate:g} % of the iterations"
        where = {"broadcast": "of each rank", "reduce": "of the reduction"}[self.grad_error_at]
        return [f"errors {where}: {GRAD_ERRORS.load(self.error_kind).describe(self)}{rate}"]
