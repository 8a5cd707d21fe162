"""Keyed random numbers: a pure function of (seed, purpose, phase, step, link, unit).

Philox4x64-10 (Salmon et al., SC 2011) is counter-based: key and counter are the arguments, packed without hashing,
so that no two different arguments can share numbers. Both ends of a link compute the same draws without a message.

Layout: key = (seed, purpose); counter words = (block within the stream, step, source << 32 | destination,
phase | kind | expert rank | pipeline stage | model chunk).
"""

from __future__ import annotations

import bisect
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from ..base.exchange import KINDS, Exchange
from ..config import NUMBERS
from .base import Channel

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK = 2**64 - 1
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def philox4x64(key: tuple[int, int], counters: np.ndarray) -> np.ndarray:
    """Return uint64[n, 4]: the block of each counter, for ``counters`` uint64[4, n], which are overwritten.

    ``numpy.random.Philox`` draws a long stream of one counter fast, but setting it to another counter costs as much as
    drawing hundreds of numbers; an exchange of N workers has N x N links with a counter each and often one number.
    Fast while the ten vectors of length n that it works with fit into a core's cache.
    """
    word = list(counters)
    high = np.empty((2, counters.shape[1]), dtype=np.uint64)
    low, scratch = np.empty_like(high), np.empty_like(high)
    free = [high[0], low[0], high[1], low[1]]
    first, second = key
    for _ in range(10):
        high0, low0, high1, low1 = free
        _multiply(word[0], _MULTIPLIERS[0], high0, low0, scratch)
        _multiply(word[2], _MULTIPLIERS[1], high1, low1, scratch)
        high1 ^= word[1]
        high1 ^= np.uint64(first)
        high0 ^= word[3]
        high0 ^= np.uint64(second)
        word, free = [high1, low1, high0, low0], word
        first, second = (first + _WEYL[0]) & _MASK, (second + _WEYL[1]) & _MASK
    return np.stack(word, axis=1)


def _multiply(a: np.ndarray, factor: int, high: np.ndarray, low: np.ndarray, scratch: np.ndarray) -> None:
    """Store the upper and lower 64 bits of ``a * factor`` in ``high`` and ``low``, by four 32-bit products."""
    factor_low, factor_high = np.uint64(factor & 2**32 - 1), np.uint64(factor >> 32)
    middle, other = scratch
    np.bitwise_and(a, _LOW, out=other)
    np.right_shift(a, _HALF, out=high)
    np.multiply(other, factor_low, out=middle)
    middle >>= _HALF
    np.multiply(high, factor_low, out=low)
    middle += low  # at most (2^32 - 1)^2 + 2^32 - 1: no overflow; so below
    other *= factor_high
    np.bitwise_and(middle, _LOW, out=low)
    other += low
    high *= factor_high
    middle >>= _HALF
    high += middle
    other >>= _HALF
    high += other
    np.multiply(a, np.uint64(factor), out=low)


#: Destination used in place of a rank when all receivers of a source share their draws.
EVERY_DESTINATION = 2**32 - 1

#: Stands where losses have their purpose.
_OTHER = 2**63

#: Numbers in a block of the generator.
PER_BLOCK = 16
#: Blocks of random numbers to draw at once, so that they stay in a core's cache.
PIECE = 2**13

# Measured microseconds (benchmarks/micro.py). They decide how the numbers of several links are drawn: with the
# generator set to one link after the other, or as blocks of all links together.
_LOOP_LINK, _LOOP_BLOCK = 3.5, 0.018
_VECTOR_CALL, _VECTOR_BLOCK = 190.0, 0.105

_local = threading.local()


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> np.random.Philox:
    """Return a generator set to ``key`` and ``counter``; one object per thread, as a new one costs 10 to 30 µs."""
    if not hasattr(_local, "philox"):
        _local.philox = np.random.Philox(key=0)
        _local.state = _local.philox.state
        _local.key = _local.state["state"]["key"]
        _local.counter = _local.state["state"]["counter"]
    _local.key[0], _local.key[1] = key  # word by word: a list of large integers would become floating point
    for word, value in enumerate(counter):
        _local.counter[word] = value
    _local.state["buffer_pos"] = 4  # nothing buffered
    _local.philox.state = _local.state
    return _local.philox


def _exchange_word(exchange: Exchange) -> int:
    stream = exchange.stream.drawn
    kinds = NUMBERS[exchange.phase] << 56 | KINDS.index(stream.kind) << 48
    return kinds | stream.expert_rank << 32 | stream.stage << 16 | stream.chunk


class Uniforms:
    """Independent uniform numbers on [0, 1), one per unit of each of L links, with 48 bits of precision.

    The upper 16 bits, ``upper`` uint16[L, units], are drawn for all units at once. The lower 32 decide only comparisons
    that the upper bits leave open (one in 65,536 per threshold), and are drawn for those units alone.

    Args:
        seed, purpose: the key.
        exchange: the exchange of the units.
        sources, destinations: integers [L]; without destinations all links of a source share their numbers.
        units: units per link.
    """

    def __init__(
        self,
        seed: int,
        purpose: int,
        exchange: Exchange,
        sources: np.ndarray,
        destinations: np.ndarray | None,
        units: int,
    ) -> None:
        self._key = (seed, 2 * purpose)
        self._step, self._exchange = exchange.step, _exchange_word(exchange)
        sources = np.asarray(sources, dtype=np.uint64) << np.uint64(32)
        if destinations is None:
            self._links = sources | np.uint64(EVERY_DESTINATION)
            distinct, which = np.unique(self._links, return_inverse=True)
            self.upper = self._upper(distinct, units)[which]
        else:
            self._links = sources | np.asarray(destinations, dtype=np.uint64)
            self.upper = self._upper(self._links, units)

    def _upper(self, links: np.ndarray, units: int) -> np.ndarray:
        blocks = -(-units // PER_BLOCK)
        one_by_one = len(links) * (_LOOP_LINK + blocks * _LOOP_BLOCK)
        if one_by_one > _VECTOR_CALL + len(links) * blocks * _VECTOR_BLOCK:
            return self._upper_at_once(links, blocks)[:, :units]
        upper = np.empty((len(links), units), dtype=np.uint16)
        for row, link in zip(upper, links.tolist()):
            raw = _philox(self._key, (0, self._step, link, self._exchange)).random_raw((units + 3) // 4)
            row[:] = raw.astype("<u8", copy=False).view("<u2")[:units]
        return upper

    def _upper_at_once(self, links: np.ndarray, blocks: int) -> np.ndarray:
        counters = np.empty((4, len(links), blocks), dtype=np.uint64)
        counters[0] = np.arange(1, blocks + 1)  # NumPy's generator counts up before the first block
        counters[1] = self._step
        counters[2] = links[:, None]
        counters[3] = self._exchange
        raw = philox4x64(self._key, counters.reshape(4, -1)).astype("<u8", copy=False)
        return raw.view("<u2").reshape(len(links), blocks * PER_BLOCK)

    def below(self, threshold: float | np.ndarray) -> np.ndarray:
        """Return bool[L, units]: True with probability ``threshold``, in [0, 1]; monotone in the threshold.

        An array [L] gives each link a threshold of its own, in [0, 1).
        """
        scaled = np.multiply(threshold, 65536.0)  # exact
        whole = np.floor(scaled).astype(np.int64)
        rest = np.rint((scaled - whole) * 2.0**32).astype(np.int64)
        if whole.ndim == 0 and whole == 65536:
            return np.ones(self.upper.shape, dtype=bool)
        whole = whole[..., None].astype(self.upper.dtype)
        result = self.upper < whole
        if rest.any():
            rest = np.broadcast_to(rest, len(self.upper))
            for place in np.flatnonzero(self.upper == whole).tolist():
                link, unit = divmod(place, self.upper.shape[1])
                result[link, unit] = self._lower(link, unit) < rest[link]
        return result

    def _lower(self, link: int, unit: int) -> int:
        key = (self._key[0], self._key[1] + 1)
        counter = (unit * 2**8, self._step, int(self._links[link]), self._exchange)
        return int(_philox(key, counter).random_raw()) >> 32


class DrawnChannel(Channel):
    """A channel that draws its outcomes, those of many links at once."""

    @abstractmethod
    def draw_links(self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int) -> np.ndarray:
        """Return the same as :meth:`delivered_links`, for at most a few thousand links or one link with many units."""

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        result = np.empty((len(sources), units), dtype=bool)
        links = max(1, PIECE // -(-units // PER_BLOCK))
        for first in range(0, len(sources), links):
            part = slice(first, first + links)
            result[part] = self.draw_links(exchange, sources[part], destinations[part], units)
        return result

    def rate(self, step: int) -> float:
        """Return the scheduled loss rate of ``step``, counted from 0."""
        starts, rates = self.loss.schedule.starts, self.loss.schedule.rates
        return rates[bisect.bisect(starts, step) - 1]

    def uniforms(
        self, purpose: int, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> Uniforms:
        """Return uniform numbers for the units of links. Receivers that lose together share the sender's numbers."""
        return Uniforms(self.seed, purpose, exchange, sources, None if self.together else destinations, units)


def words(seed: int, purpose: int, exchange: Exchange, rank: int) -> Callable[[int], np.ndarray]:
    """Return a function that gives the next ``count`` independent 64-bit words of one rank, uint64[count]."""
    return _stream(seed, 2 * purpose, exchange, rank << 32 | rank).random_raw


def generator(seed: int, exchange: Exchange, source: int, number: int) -> np.random.Generator:
    """Return random numbers for purposes other than losses, from the arguments. ``number``: purpose, below 2^32."""
    return np.random.Generator(_stream(seed, _OTHER, exchange, source << 32 | number))


def choosing_numbers(seed: int, exchange: Exchange, count: int) -> np.ndarray:
    """Return uint64[count]: numbers that choose the elements of an exchange. No other draw shares them."""
    return _stream(seed, _OTHER + 1, exchange, 0).random_raw(count)


def _stream(seed: int, purpose: int, exchange: Exchange, link: int) -> np.random.Philox:
    return np.random.Philox(key=[seed, purpose], counter=[0, exchange.step, link, _exchange_word(exchange)])


def coding_keys(seed: int, exchange: Exchange, source: int, destinations: Sequence[int]) -> np.ndarray:
    """Return int32[D, 2]: the key that rounds gradients from ``source`` to each of ``destinations``; of no other draw.

    Step and link are in it: the same errors in every step would be a bias, and those of all senders would not cancel.
    """
    counters = np.empty((4, len(destinations)), dtype=np.uint64)
    counters[0], counters[1], counters[3] = 1, exchange.step, _exchange_word(exchange)
    counters[2] = np.uint64(source << 32) | np.asarray(destinations, dtype=np.uint64)
    words = philox4x64((seed, _OTHER + 2), counters)[:, 0].astype("<u8")
    return words.view("<i4").reshape(-1, 2)
