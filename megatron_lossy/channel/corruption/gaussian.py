"""Gaussian errors (PAFT, equation 4), and at an interval a larger one (section 5, "accidental large noise")."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.errors import refuse
from ...base.exchange import Exchange
from ...base.flags import as_text
from ...config.grad_errors import ErrorFlags
from ..draws import words
from .base import LARGEST, NOISE, Corruption, Event


class Gaussian(Corruption):
    """Adds independent noise of mean 0 to every element.

    The paper writes a variance in most places and a standard deviation in some; the flag is the standard deviation.
    """

    name = "gaussian"

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        std, relative = config.grad_error_std, config.grad_error_relative
        for flag, value in (("--grad-error", std), ("--grad-error-relative", relative)):
            if value is not None and not 0 <= value <= LARGEST:
                given = config.grad_error if flag == "--grad-error" else value
                raise refuse(flag, given, f"must be finite in float32 (at most {LARGEST:.3g}) and at least 0")
        if std is not None and relative is not None:
            raise refuse("--grad-error-relative", relative, f"cannot be combined with --grad-error {config.grad_error}")
        burst = config.grad_error_burst
        if burst is not None:
            interval, larger = burst
            if not (interval >= 1 and interval == int(interval) and 0 < larger <= LARGEST):
                allowed = f"must be a whole number of at least 1, and a number above 0 of at most {LARGEST:.3g}"
                raise refuse("--grad-error-burst", as_text(burst), allowed)
        if not (std or relative or burst):
            raise refuse("--grad-error", config.grad_error, "needs gaussian:STD or --grad-error-relative above 0")

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        relative = config.grad_error_relative is not None
        std = (config.grad_error_relative if relative else config.grad_error_std) or 0.0
        unit = " of the gradient's root mean square" if relative else ""
        burst = ""
        if config.grad_error_burst is not None:
            interval, larger = config.grad_error_burst
            burst = f", {larger:g} every {interval:g} iterations"
        return f"gaussian, standard deviation {std:g}{burst}{unit}"

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        config = self.config
        relative = config.grad_error_relative is not None
        std = (config.grad_error_relative if relative else config.grad_error_std) or 0.0
        if config.grad_error_burst is not None:
            interval, larger = config.grad_error_burst
            if (exchange.step + 1) % int(interval) == 0:
                std = larger
        if not std:
            return []
        seeds = words(config.loss_seed, NOISE, exchange, rank)(len(sizes)).tolist()
        return [
            Event(exchange.step, exchange.stream, bucket, rank, self.name, std, relative, seed)
            for bucket, (seed, size) in enumerate(zip(seeds, sizes, strict=True))
            if size
        ]
