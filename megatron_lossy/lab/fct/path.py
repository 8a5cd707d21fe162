"""The way of a message between two data centers (SMART, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass


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
