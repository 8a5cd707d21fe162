"""Flipped bits: silent data corruption as hardware makes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...base.errors import refuse
from ...base.exchange import Exchange
from ...config.grad_errors import ErrorFlags
from ..draws import words
from .base import BITS, ELEMENTS, Corruption, Event

#: Bits that ``--grad-error`` may name.
ALLOWED_BITS = "needs 0 <= LOW <= HIGH <= {last}, the bits of a gradient"


class BitFlip(Corruption):
    """Flips one bit in each of several different elements of a stream. All elements are equally likely."""

    name = "bit-flip"

    @classmethod
    def check(cls, config: ErrorFlags) -> None:
        check_bits(config, 32)

    @classmethod
    def describe(cls, config: ErrorFlags) -> str:
        count, bits = config.flips
        which = "" if bits is None else f" among {bits[0]} to {bits[1]}"
        return f"{count} flipped bits{which}"

    def draw(self, exchange: Exchange, rank: int, sizes: Sequence[int], width: int) -> list[Event]:
        seed = self.config.loss_seed
        ends = np.cumsum(sizes)
        count, bounds = self.config.flips
        flips = min(count, int(ends[-1]))
        places = _distinct(words(seed, ELEMENTS, exchange, rank), flips, int(ends[-1]))
        low, high = bounds or (0, width - 1)
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
    _, bits = config.flips
    if bits is not None and not 0 <= bits[0] <= bits[1] < width:
        raise refuse("--grad-error", config.grad_error, ALLOWED_BITS.format(last=width - 1))


def _distinct(words: Callable[[int], np.ndarray], count: int, population: int) -> np.ndarray:
    """Return int64[count]: the first different numbers below ``population`` that ``words`` gives."""
    found: dict[int, None] = {}
    while len(found) < count:
        for number in (words(count) % np.uint64(population)).tolist():
            if len(found) < count:
                found[number] = None
    return np.fromiter(found, dtype=np.int64, count=count)
