"""All workers of one process: an exchange is an addition in memory, and one draw serves all of its ranks."""

from __future__ import annotations

from collections.abc import Sequence

from ..exchange import BucketUnits, Delivery, Exchange, Stream
from .drawn import Drawn, Latest, Networks, draw


class Memory:
    """What arrives between ``size`` workers at once; :meth:`worker` is the transport of one of them."""

    def __init__(self, networks: Networks, stream: Stream, size: int, cut: dict[str, Sequence[BucketUnits]]) -> None:
        self.networks = networks
        self.stream = stream
        self.members = range(size)
        self.cut = cut
        self._latest = Latest()

    def foresee(self, exchange: Exchange) -> Delivery:
        """The delivery at all workers."""
        delivery = self._latest.get(exchange)
        if delivery is None:
            network, cut = self.networks[exchange.phase], self.cut[exchange.phase]
            arrived = draw(network, exchange, self.members, self.members, cut)
            delivery = Delivery(exchange, self.members, self.members, arrived, cut)
            self._latest.put(exchange, delivery)
        return delivery

    def worker(self, rank: int) -> WorkerTransport:
        """The transport of worker ``rank``."""
        return WorkerTransport(self, rank)


class WorkerTransport(Drawn):
    """What one worker sees of :class:`Memory`."""

    def __init__(self, memory: Memory, rank: int) -> None:
        super().__init__(memory.networks, memory.stream, memory.members, rank, memory.cut)
        self._memory = memory

    def foresee(self, exchange: Exchange) -> Delivery:
        everyone = self._memory.foresee(exchange)
        mine = slice(self.rank, self.rank + 1)
        arrived, sent = everyone.arrived[mine], everyone.arrived[:, self.rank]
        return Delivery(exchange, everyone.sources, everyone.receivers[mine], arrived, everyone.cut, sent)
