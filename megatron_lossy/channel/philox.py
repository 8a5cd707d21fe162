"""Philox4x64-10 (Salmon et al., SC 2011) of many counters at once, in NumPy.

``numpy.random.Philox`` draws a long stream of one counter fast, but setting it to another counter costs as much as
drawing hundreds of numbers; an exchange of N workers has N x N links with a counter each and often one number.
"""

from __future__ import annotations

import numpy as np

_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_MASK = 2**64 - 1
_LOW, _HALF = np.uint64(2**32 - 1), np.uint64(32)


def philox4x64(key: tuple[int, int], counters: np.ndarray) -> np.ndarray:
    """uint64[n, 4]: the block of each counter, for ``counters`` uint64[4, n], which are overwritten.

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
    """``high`` and ``low``: the upper and lower 64 bits of ``a * factor``, from four products of 32-bit halves."""
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
