"""What arrives between all workers at once: one boolean array per phase and step, shared by their groups."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from ..exchange import Exchange, Stream
from ..transport import Deliveries, Network


class Arrivals:
    """The outcomes of one phase of one stream between ``size`` workers, for the latest steps."""

    def __init__(self, network: Network, stream: Stream, size: int, units: int) -> None:
        self.network = network
        self.stream = stream
        self.size = size
        self.units = units
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def at(self, step: int) -> np.ndarray:
        """bool[N, N, units]: what arrives at each worker (first axis) from each source (second)."""
        known = self._kept.get(step)
        if known is None:
            ranks = np.arange(self.size)
            sources, destinations = np.tile(ranks, self.size), np.repeat(ranks, self.size)
            exchange = Exchange(self.network.phase, self.stream, step)
            known = self.network.delivered_links(exchange, sources, destinations, self.units)
            known = known.reshape(self.size, self.size, self.units)
            known.flags.writeable = False
            self._kept[step] = known
            while len(self._kept) > 3:  # the previous, this and the next step
                self._kept.popitem(last=False)
        return known


class WorkerDeliveries(Deliveries):
    """The rows of :class:`Arrivals` that one worker sees."""

    def __init__(
        self, arrivals: Arrivals, network: Network, stream: Stream, members: Sequence[int], rank: int, units: int
    ) -> None:
        super().__init__(network, stream, members, rank, units)
        self._arrivals = arrivals

    def outgoing(self, step: int) -> np.ndarray:
        return self._arrivals.at(step)[:, self.rank]

    def incoming(self, step: int) -> np.ndarray:
        return self._arrivals.at(step)[self.rank]

    def prepare(self, step: int, outgoing: bool) -> None:
        """Nothing: one draw serves all workers."""
