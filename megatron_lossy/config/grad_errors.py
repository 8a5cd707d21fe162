"""Flags of errors in reduced gradients (docs/corruption.md). :class:`.config.LossyConfig` inherits them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..base.errors import refuse
from ..base.flags import as_text, check_choice, flag, refuse_unused
from ..base.registry import GRAD_ERRORS
from ..base.section import Flags


class Noise(NamedTuple):
    """Gaussian noise of standard deviation ``std``, of ``more`` in every ``interval``-th iteration if that is not 0.

    ``relative``: both are in units of the root mean square of a bucket's gradient.
    """

    std: float = 0.0
    relative: bool = False
    interval: int = 1
    more: float = 0.0


@dataclass(frozen=True)
class ErrorFlags(Flags):
    """Flags of errors in reduced gradients. Raises :class:`UsageError` for a value that is not allowed."""

    in_headings: ClassVar[bool] = True

    grad_error: str = flag(
        "none",
        "what happens to a reduced gradient: nothing; Gaussian noise, STD its standard deviation in units of the gradient that the "
        "optimizer sees, with rms of the root mean square of a bucket (1rms: as long as the gradient), and MORE in every N-th "
        "iteration; flipped bits, one in each of K elements of a stream (1), "
        "among the bits LOW to HIGH, from 0, the lowest of the mantissa (all) (docs/corruption.md)",
        metavar="{none,gaussian:STD[rms][,N,MORE],bit-flip[:K[,LOW,HIGH]]}",
        group="errors in gradients",
        basic=True,
    )
    grad_error_rate: float = flag(
        1.0, "probability that the error happens, per iteration, rank and stream; in [0, 1]", metavar="P"
    )
    grad_error_at: str = flag(
        "broadcast",
        "broadcast: each rank has errors of its own, which needs full replicas; reduce: the reduction itself is wrong, with "
        "the distributed optimizer at each owner's shard, otherwise in the same way at all ranks",
        choices=("broadcast", "reduce"),
    )
    grad_error_ranks: tuple[int, ...] | None = flag(
        None, "ranks of the data-parallel group that errors can hit; default all", metavar="RANK"
    )

    @property
    def error_kind(self) -> str:
        """The name of the errors."""
        return self.grad_error.partition(":")[0]

    @property
    def noise(self) -> Noise:
        """The noise of ``gaussian``; else none. Raises :class:`UsageError`."""
        if self.error_kind != "gaussian":
            return Noise()
        std, *burst = self.grad_error.partition(":")[2].split(",")
        try:
            interval, more = (int(burst[0]), float(burst[1])) if burst else (1, 0.0)
            if len(burst) not in (0, 2) or interval < 1:
                raise ValueError
            return Noise(float(std.removesuffix("rms")), std.endswith("rms"), interval, more)
        except (ValueError, IndexError):
            allowed = "must be gaussian:STD or gaussian:STD,N,MORE, with N at least 1; STDrms: in units of the root mean square"
            raise refuse("--grad-error", self.grad_error, allowed) from None

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
            why = "must be bit-flip, bit-flip:K or bit-flip:K,LOW,HIGH, with K at least 1"
            raise refuse("--grad-error", self.grad_error, why)
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
