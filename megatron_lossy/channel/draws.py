"""Keyed random numbers: a pure function of (seed, purpose, phase, step, link, unit).

Philox4x64-10 (Salmon et al., SC 2011) is counter-based: key and counter are the arguments, packed without hashing,
so that no two different arguments can share numbers. Both ends of a link compute the same draws without a message.

Layout: key = (seed, purpose); counter words = (block within the stream, step, source << 32 | destination,
phase | kind | expert rank | pipeline stage | model chunk).
"""

from __future__ import annotations

import threading

import numpy as np

from ..config import PHASES
from .exchange import KINDS, Exchange

#: Destination used in place of a rank when all receivers of a source share their draws.
EVERY_DESTINATION = 2**32 - 1

_local = threading.local()


def _philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> np.random.Philox:
    """A generator set to ``key`` and ``counter``; one object per thread, since constructing one costs 10 to 30 µs."""
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


def _link_word(source: int, destination: int) -> int:
    return source << 32 | destination


def _exchange_word(exchange: Exchange) -> int:
    stream = exchange.stream
    return (
        PHASES.index(exchange.phase) << 56
        | KINDS.index(stream.kind) << 48
        | stream.expert_rank << 32
        | stream.stage << 16
        | stream.chunk
    )


class Uniforms:
    """Independent uniform numbers on [0, 1), one per unit of a link's exchange, with 48 bits of precision.

    The upper 16 bits are drawn for all units at once. The lower 32 decide only comparisons that the upper bits
    leave open (one in 65,536 per threshold), and are drawn for those units alone.
    """

    def __init__(self, seed: int, purpose: int, exchange: Exchange, source: int, destination: int, units: int) -> None:
        self._key = (seed, 2 * purpose)
        self._counter = (exchange.step, _link_word(source, destination), _exchange_word(exchange))
        raw = _philox(self._key, (0, *self._counter)).random_raw((units + 3) // 4)
        self.upper = raw.astype("<u8", copy=False).view("<u2")[:units]

    def below(self, threshold: float) -> np.ndarray:
        """bool[units]: True with probability ``threshold``, in [0, 1]; monotone in the threshold."""
        scaled = threshold * 65536.0  # exact
        whole = int(scaled)
        if whole >= 65536:
            return np.ones(self.upper.shape, dtype=bool)
        result = self.upper < np.uint16(whole)
        rest = round((scaled - whole) * 2.0**32)
        if rest:
            for unit in np.flatnonzero(self.upper == np.uint16(whole)):
                result[unit] = self._lower(int(unit)) < rest
        return result

    def _lower(self, unit: int) -> int:
        key = (self._key[0], self._key[1] + 1)
        return int(_philox(key, (unit * 2**8, *self._counter)).random_raw()) >> 32
