"""All workers of one process: an exchange is an addition in memory, and one draw serves all of its ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from ..base.exchange import BucketUnits, Delivery, Exchange, Stream, units_of
from ..recovery import Gradients, GradRecovery
from .base import Transfer
from .coded import Coded
from .drawn import DrawnWire, Latest, Networks, draw


class Memory:
    """The deliveries between all ``members``, ranks of the full group. :meth:`worker` is the wire of one of them.

    ``coded``: of each of them, by phase, the codes of values that cross in codes. ``shard_bytes``: see :class:`Wire`.
    """

    def __init__(
        self,
        networks: Networks,
        stream: Stream,
        members: Sequence[int],
        cut: dict[str, Sequence[BucketUnits]],
        coded: Sequence[Mapping[str, Coded]] = (),
        shard_bytes: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        self.networks = networks
        self.stream = stream
        self.members = members
        self.cut = cut
        self.coded = coded
        self.shard_bytes = shard_bytes
        self._latest = Latest()
        self._final = Latest()

    def recovered(self, exchange: Exchange, source: int, units: BucketUnits, lost: np.ndarray) -> None:
        """Note the units from ``source`` that are lost for good, ``lost`` bool[N, count]."""
        known = self._final.get(exchange)
        arrived = self.foresee(exchange).arrived if known is None else known[0]
        if not arrived.flags.writeable:  # it is in a delivery
            arrived = arrived.copy()
        arrived[:, source, units.numbers] = ~lost
        self._final.put(exchange, (arrived, None))

    def final(self, exchange: Exchange) -> Delivery:
        """The delivery at all workers, including units that senders delivered in spite of the draw."""
        known = self._final.get(exchange)
        if known is None:
            return self.foresee(exchange)
        arrived, delivery = known
        if delivery is None:
            arrived.flags.writeable = False
            delivery = replace(self.foresee(exchange), arrived=arrived)
            self._final.put(exchange, (arrived, delivery))
        return delivery

    def foresee(self, exchange: Exchange) -> Delivery:
        """The drawn delivery at all workers."""
        delivery = self._latest.get(exchange)
        if delivery is None:
            network, cut = self.networks[exchange.phase], self.cut[exchange.phase]
            arrived = draw(network, exchange, self.members, self.members, units_of(cut))
            delivery = Delivery(exchange, self.members, self.members, arrived, cut)
            self._latest.put(exchange, delivery)
        return delivery

    def worker(self, rank: int) -> WorkerWire:
        """The wire of worker ``rank``."""
        return WorkerWire(self, rank)


class WorkerWire(DrawnWire):
    """One worker's view of :class:`Memory`."""

    def __init__(self, memory: Memory, rank: int) -> None:
        coded = memory.coded[rank] if memory.coded else None
        super().__init__(memory.networks, memory.stream, memory.members, rank, memory.cut, coded)
        self.shard_bytes = memory.shard_bytes
        self._memory = memory

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        transfer = super().reduce_scatter(x, rule)
        if rule.final is not None:
            self.recovered(x.exchange, rule.units, rule.final.mask)
        return transfer

    def recovered(self, exchange: Exchange, units: BucketUnits, lost: np.ndarray) -> None:
        """Note the units of this worker's bucket, cut into ``units``, that stay lost: ``lost`` bool[N, count]."""
        self._memory.recovered(exchange, self.rank, units, lost)

    def foresee(self, exchange: Exchange) -> Delivery:
        return self._of(self._memory.foresee(exchange))

    def delivery(self, exchange: Exchange) -> Delivery:
        return self._of(self._memory.final(exchange))

    def _made(self, delivery: Delivery) -> Delivery:
        # The units that senders delivered in spite of the draw are known when all have begun.
        return self.delivery(delivery.exchange)

    def _of(self, everyone: Delivery) -> Delivery:
        mine = slice(self.rank, self.rank + 1)
        arrived, sent = everyone.arrived[mine], everyone.arrived[:, self.rank]
        return Delivery(everyone.exchange, everyone.sources, everyone.receivers[mine], arrived, everyone.cut, sent)
