"""Flipped bits: silent data corruption as hardware makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...base.errors import refuse
from ...base.exchange import Exchange
from ...base.flags import as_text
from ...config.grad_errors import ErrorFlags
from ..draws import words
from .base import BITS, ELEMENTS, Corruption, Event

#: Bits that ``--grad-error-bits`` may name.
ALLOWED_BITS = "needs 0 <= LOW <= HIGH <= {last}, the bits of a gradient"


class BitFlip(Corruption):
    """Flips one bit in each of several different elements of a stream. All elements are equally likely."""

    name = "bit-flip"
    flags = (*Corruption.flags, "grad_error_flips", "grad_error_bits")

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        if config.grad_error_flips < 1:
            raise refuse("--grad-error-flips", config.grad_error_flips, "must be at least 1")
        check_bits(config, 32)

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        bits = config.grad_error_bits
        which = "" if bits is None else f" among {bits[0]} to {bits[1]}"
        return f"{config.grad_error_flips} flipped bits{which}"

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        seed = self.config.loss_seed
        ends = np.cumsum(sizes)
        flips = min(self.config.grad_error_flips, int(ends[-1]))
        places = _different(words(seed, ELEMENTS, exchange, rank), flips, int(ends[-1]))
        low, high = self.config.grad_error_bits or (0, width - 1)
        bits = words(seed, BITS, exchange, rank)(flips) % np.uint64(high - low + 1) + np.uint64(low)
        buckets = np.searchsorted(ends, places, side="right")
        events = []
        for bucket in np.unique(buckets).tolist():
            here = buckets == bucket
            elements = places[here] - (int(ends[bucket]) - int(sizes[bucket]))
            events.append(
                Event(
                    exchange.step, exchange.stream, bucket, rank, self.name,
                    elements=tuple(elements.tolist()), bits=tuple(bits[here].tolist()),
                )
            )  # fmt: skip
        return events


def check_bits(config: ErrorFlags, width: int) -> None:
    """Raise :class:`UsageError` unless the bits to flip are among the ``width`` of an element."""
    if config.grad_error_bits is not None:
        low, high = config.grad_error_bits
        if not 0 <= low <= high < width:
            raise refuse("--grad-error-bits", as_text(config.grad_error_bits), ALLOWED_BITS.format(last=width - 1))


def _different(words: Callable[[int], np.ndarray], count: int, population: int) -> np.ndarray:
    """int64[count]: the first different numbers below ``population`` that ``words`` gives."""
    found: dict[int, None] = {}
    while len(found) < count:
        for number in (words(count) % np.uint64(population)).tolist():
            if len(found) < count:
                found[number] = None
    return np.fromiter(found, dtype=np.int64, count=count)
