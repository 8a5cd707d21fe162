"""The way of a message between two data centers (SMART, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Path:
    """Nine hops between servers of two fat-trees, each site's border joined to its cores. Times in microseconds.

    ``inside``, ``between``: Gbit/s of a link of a data center, and of the one between them, which ``pairs`` of servers
    share evenly. ``delay``, ``hop_delay``: propagation of the link between, and of each other one. ``payload``,
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
        """From one packet to the next, at the rate that a sender has."""
        return _time(self.payload + self.headers, min(self.inside, self.between / self.pairs))

    @property
    def latency(self) -> float:
        """From the time that a packet has left its sender until it has arrived."""
        return self._way(self.payload + self.headers)

    @property
    def control(self) -> float:
        """The same for a packet without payload; these are never lost."""
        return self._way(self.headers)

    @property
    def rtt(self) -> float:
        """A packet there, and its answer back."""
        return self.latency + self.control

    def _way(self, size: int) -> float:
        # Eight hops inside, of which the first is the sender's own, and one between.
        return self.delay + 8 * self.hop_delay + 7 * _time(size, self.inside) + _time(size, self.between)

    def packets(self, size: float) -> int:
        """Packets of a message of ``size`` bytes."""
        return max(1, -(-round(size) // self.payload))


def _time(size: int, gigabits: float) -> float:
    return size * 8 / (gigabits * 1000)
