"""The way of a message between two data centers (SMART, section 4.1), and the packets of it that are lost."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Path:
    """Nine hops between servers of two fat-trees, each site's border joined to its cores. Times in microseconds.

    ``inside``, ``between``: Gbit/s of a link in a data center, and of the link between them, which ``pairs`` of servers
    share evenly. ``delay``, ``hop_delay``: propagation of the link between, and of each other link. ``payload``,
    ``headers``: bytes of a packet.
    """

    inside: float = 100.0
    between: float = 400.0
    delay: float = 400.0
    hop_delay: float = 1.0
    payload: int = 4096
    headers: int = 62
    pairs: int = 1

    @property
    def slot(self) -> float:
        """The time from one packet to the next, at the sender's rate."""
        return _time(self.payload + self.headers, min(self.inside, self.between / self.pairs))

    @property
    def latency(self) -> float:
        """The time from a packet's departure at its sender to its arrival."""
        return self._way(self.payload + self.headers)

    @property
    def control(self) -> float:
        """The latency of a packet without payload; such packets are never lost."""
        return self._way(self.headers)

    @property
    def rtt(self) -> float:
        """The time of a packet to its receiver, and of the answer back."""
        return self.latency + self.control

    def _way(self, size: int) -> float:
        # There are eight hops inside, the first being the sender's own, and one between.
        return self.delay + 8 * self.hop_delay + 7 * _time(size, self.inside) + _time(size, self.between)

    def packets(self, size: float) -> int:
        """Packets of a message of ``size`` bytes."""
        return max(1, -(-round(size) // self.payload))


def _time(size: int, gigabits: float) -> float:
    return size * 8 / (gigabits * 1000)


class Losses:
    """The draws of one message. All schemes have the same losses, as far as they send the same packets.

    ``p``: loss rate. ``burst``: mean number of packets lost in a row (Gilbert-Elliott; everything is lost in the bad
    state), or ``None`` for independent losses. Packets that are sent again are lost independently.
    """

    def __init__(self, p: float, seed: int, flow: int, burst: float | None = None) -> None:
        self.p = p
        self.burst = burst
        self._key = (seed, flow)

    def _generator(self, purpose: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self._key[0], counter=[0, 0, self._key[1], purpose]))

    def first(self, data: int, parities: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """bool[data] and bool[parities]: the packets that are lost when first sent.

        ``parities`` int[P]: the number of data packets before each parity.
        """
        if self.burst is None:
            lost = self._generator(0).random(data) < self.p
            return lost, self._generator(1).random(len(parities)) < self.p
        chain = self._chain(data + len(parities))
        places = parities + np.arange(len(parities))
        is_parity = np.zeros(len(chain), dtype=bool)
        is_parity[places] = True
        return chain[~is_parity], chain[is_parity]

    def _chain(self, length: int) -> np.ndarray:
        """bool[length]: a stationary two-state chain, in runs of geometric length."""
        assert self.burst is not None
        if not self.p:
            return np.zeros(length, dtype=bool)
        random = self._generator(0)
        good, bad = self.p / ((1 - self.p) * self.burst), 1 / self.burst  # probabilities of leaving that state
        state = bool(random.random() < self.p)
        runs: list[int] = []
        while sum(runs) < length:
            runs.append(int(random.geometric(bad if state ^ (len(runs) % 2 == 1) else good)))
        states = np.arange(len(runs)) % 2 == (0 if state else 1)
        return np.repeat(states, runs)[:length]

    def again(self, data: int) -> np.ndarray:
        """int[data]: the number of repetitions that each packet needs to arrive, if it is sent again."""
        return self._generator(2).geometric(1 - self.p, data)

    def important(self, data: int, count: int) -> np.ndarray:
        """int[count], rising: the packets of data that have high priority."""
        return np.sort(self._generator(3).permutation(data)[:count])
