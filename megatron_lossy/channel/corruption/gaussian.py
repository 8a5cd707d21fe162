"""Gaussian errors (PAFT, equation 4), and at an interval a larger one (section 5, "accidental large noise")."""

from __future__ import annotations

from collections.abc import Sequence

from ...base.errors import refuse
from ...base.exchange import Exchange
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
        std, _, _, more = config.noise
        if not (0 <= std <= LARGEST and 0 <= more <= LARGEST and std + more > 0):
            allowed = f"must be finite in float32 (at most {LARGEST:.3g}), at least 0, and above 0 in some iteration"
            raise refuse("--grad-error", config.grad_error, allowed)

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        std, relative, interval, more = config.noise
        unit = " of the gradient's root mean square" if relative else ""
        burst = f", {more:g} every {interval} iterations" if more else ""
        return f"gaussian, standard deviation {std:g}{burst}{unit}"

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        std, relative, interval, more = self.config.noise
        if more and (exchange.step + 1) % interval == 0:
            std = more
        if not std:
            return []
        seeds = words(self.config.loss_seed, NOISE, exchange, rank)(len(sizes)).tolist()
        return [
            Event(exchange.step, exchange.stream, bucket, rank, self.name, std, relative, seed)
            for bucket, (seed, size) in enumerate(zip(seeds, sizes, strict=True))
            if size
        ]
