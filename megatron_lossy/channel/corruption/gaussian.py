"""Gaussian errors (PAFT, equation 4), and at an interval a larger one (section 5, "accidental large noise")."""

from __future__ import annotations

from collections.abc import Sequence

from ...config.errors import ErrorFlags
from ...errors import refuse
from ...exchange import Exchange
from ..draws import words
from .base import LARGEST, NOISE, Corruption, Event


class Gaussian(Corruption):
    """Adds independent noise of mean 0 to every element.

    The paper writes a variance in most places and a standard deviation in some; the flag is the standard deviation.
    """

    name = "gaussian"
    flags = (
        *Corruption.flags,
        "grad_error_std",
        "grad_error_relative",
        "grad_error_burst_interval",
        "grad_error_burst_std",
    )

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        std, relative = config.grad_error_std, config.grad_error_relative
        interval, burst = config.grad_error_burst_interval, config.grad_error_burst_std
        for flag, value in (
            ("--grad-error-std", std), ("--grad-error-relative", relative), ("--grad-error-burst-std", burst)
        ):  # fmt: skip
            if value is not None and not 0 <= value <= LARGEST:
                raise refuse(flag, value, f"must be finite in float32 (at most {LARGEST:.3g}) and at least 0")
        if std is not None and relative is not None:
            raise refuse("--grad-error-relative", relative, "cannot be combined with --grad-error-std")
        if interval < 0:
            raise refuse("--grad-error-burst-interval", interval, "must be at least 0")
        if interval and not burst:
            raise refuse("--grad-error-burst-interval", interval, "needs --grad-error-burst-std above 0")
        if burst and not interval:
            raise refuse("--grad-error-burst-std", burst, "needs --grad-error-burst-interval")
        if not (std or relative or interval):
            raise refuse("--grad-error", "gaussian", "needs --grad-error-std or --grad-error-relative above 0")

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        relative = config.grad_error_relative is not None
        std = (config.grad_error_relative if relative else config.grad_error_std) or 0.0
        unit = " of the gradient's root mean square" if relative else ""
        interval = config.grad_error_burst_interval
        burst = f", {config.grad_error_burst_std:g} every {interval} iterations" if interval else ""
        return f"gaussian, standard deviation {std:g}{burst}{unit}"

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        config = self.config
        relative = config.grad_error_relative is not None
        std = (config.grad_error_relative if relative else config.grad_error_std) or 0.0
        interval = config.grad_error_burst_interval
        if interval and (exchange.step + 1) % interval == 0:
            std = config.grad_error_burst_std
        if not std:
            return []
        seeds = words(config.loss_seed, NOISE, exchange, rank)(len(sizes)).tolist()
        return [
            Event(exchange.step, exchange.stream, bucket, rank, self.name, std, relative, seed)
            for bucket, (seed, size) in enumerate(zip(seeds, sizes, strict=True))
            if size
        ]
