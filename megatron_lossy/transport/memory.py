"""All workers of one process: an exchange is an addition in memory, and one draw serves all of its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from ..exchange import BucketUnits, Delivery, Exchange, Stream
from .drawn import Drawn, Latest, Networks, draw


class Memory:
    """What arrives between ``members`` at once, ranks of the full group; :meth:`worker` is the transport of one of them."""

    def __init__(
        self, networks: Networks, stream: Stream, members: Sequence[int], cut: dict[str, Sequence[BucketUnits]]
    ) -> None:
        self.networks = networks
        self.stream = stream
        self.members = members
        self.cut = cut
        self._latest = Latest()
        self._final = Latest()

    def recovered(self, exchange: Exchange, source: int, units: BucketUnits, lost: np.ndarray) -> None:
        """What of the units that ``source`` sends is lost for good."""
        final = self._final.get(exchange)
        if final is None:
            known = self.foresee(exchange)
            final = replace(known, arrived=known.arrived.copy())
            self._final.put(exchange, final)
        final.arrived[:, source, units.numbers] = ~lost

    def final(self, exchange: Exchange) -> Delivery:
        """The delivery at all workers, after what senders had delivered all the same."""
        final = self._final.get(exchange)
        return self.foresee(exchange) if final is None else final

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

    def _delivering(self, exchange: Exchange) -> Callable[[], Delivery]:
        # What senders have delivered all the same is known when all have begun.
        return lambda: self._of(self._memory.final(exchange))

    def recovered(self, exchange: Exchange, units: BucketUnits, lost: np.ndarray) -> None:
        self._memory.recovered(exchange, self.rank, units, lost)

    def foresee(self, exchange: Exchange) -> Delivery:
        return self._of(self._memory.foresee(exchange))

    def _of(self, everyone: Delivery) -> Delivery:
        mine = slice(self.rank, self.rank + 1)
        arrived, sent = everyone.arrived[mine], everyone.arrived[:, self.rank]
        return Delivery(everyone.exchange, everyone.sources, everyone.receivers[mine], arrived, everyone.cut, sent)
