"""All ranks of a group in one process: they exchange in memory, and no process group is needed.

docs/transport.md has a whole program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from ...base.exchange import BucketUnits, Delivery, Exchange, Stream, units_of
from ...config import PHASES, LossyConfig
from ...config.facts import Facts
from ...config.refusal import check_refusals
from ...recovery import Gradients, GradRecovery
from ...recovery.base import nothing, ordered_sum
from ...transport.base import DrawnWire, LatestExchanges, Network, Networks, Transfer, check_links, draw
from ...transport.choice import BucketSpec, cut_buckets, shard_bytes
from ...transport.coded import CodedBuckets, coded_of
from ...transport.group import LossyGroup
from ...transport.network import consecutive_nodes


@dataclass
class Memory:
    """All workers of one process: an exchange is an addition in memory, and one draw serves all of its ranks.

    It has the deliveries between all ``members``, ranks of the full group. :class:`WorkerWire` is the wire of one of them.

    ``coded``: of each of them, by phase, the codes of values that cross in codes. ``shard_bytes``: see :class:`Wire`.
    """

    networks: Networks
    stream: Stream
    members: Sequence[int]
    cut: dict[str, Sequence[BucketUnits]]
    coded: Sequence[Mapping[str, CodedBuckets]] = ()
    shard_bytes: Mapping[str, int] = field(default_factory=dict)
    _latest: LatestExchanges = field(default_factory=LatestExchanges)
    _final: LatestExchanges = field(default_factory=LatestExchanges)

    def recovered(self, exchange: Exchange, source: int, units: BucketUnits, lost: np.ndarray) -> None:
        """Note the units from ``source`` that are lost for good, ``lost`` bool[N, count]."""
        known = self._final.get(exchange)
        arrived = self.foresee(exchange).arrived if known is None else known[0]
        if not arrived.flags.writeable:  # it is in a delivery
            arrived = arrived.copy()
        arrived[:, source, units.numbers] = ~lost
        self._final.put(exchange, (arrived, None))

    def final(self, exchange: Exchange) -> Delivery:
        """Return the delivery at all workers, including units that senders delivered in spite of the draw."""
        if (known := self._final.get(exchange)) is None:
            return self.foresee(exchange)
        arrived, delivery = known
        if delivery is None:
            arrived.flags.writeable = False
            delivery = replace(self.foresee(exchange), arrived=arrived)
            self._final.put(exchange, (arrived, delivery))
        return delivery

    def foresee(self, exchange: Exchange) -> Delivery:
        """Return the drawn delivery at all workers."""
        if (delivery := self._latest.get(exchange)) is None:
            network, cut = self.networks[exchange.phase], self.cut[exchange.phase]
            arrived = draw(network, exchange, self.members, self.members, units_of(cut))
            delivery = Delivery(exchange, self.members, self.members, arrived, cut)
            self._latest.put(exchange, delivery)
        return delivery


class WorkerWire(DrawnWire):
    """One worker's view of :class:`Memory`."""

    def __init__(self, memory: Memory, rank: int) -> None:
        coded = memory.coded[rank] if memory.coded else None
        super().__init__(memory.networks, memory.stream, memory.members, rank, memory.cut, coded)
        self.shard_bytes = memory.shard_bytes
        self._memory = memory

    def reduce_scatter(self, x: Gradients, rule: GradRecovery) -> Transfer:
        transfer = super().reduce_scatter(x, rule)
        if rule.protected is not None and rule.protected.final is not None:
            self._memory.recovered(x.exchange, self.rank, rule.units, rule.protected.final.mask)
        return transfer

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


def groups_in_memory(
    config: LossyConfig, specs: Sequence[BucketSpec], stream: Stream, members: range, ranks: int, steps: int | None
) -> tuple[Memory, list[LossyGroup]]:
    """Return the memory that the workers ``members`` of ``ranks`` exchange through, and the group of each of them.

    ``steps``: length of the run, if known. Raise :class:`UsageError` if the loss flags do not fit.
    """
    cut = cut_buckets(config, specs)
    nodes = None if config.ranks_of_node is None else consecutive_nodes(range(ranks), config.ranks_of_node)
    networks = {phase: Network(config, phase, ranks, nodes) for phase in PHASES}
    check_links(networks, stream, cut, len(members), steps)
    coded = [coded_of(config, cut, members, rank) for rank in range(len(members))]
    memory = Memory(networks, stream, members, cut, coded, shard_bytes(config, specs, cut))
    return memory, [LossyGroup(config, WorkerWire(memory, rank)) for rank in range(len(members))]


class LossyWorkers:
    """``workers`` ranks in one process. They lose the same units as so many real ranks with the same flags.

    ``buckets`` and ``steps``: see :meth:`LossyGroup.create`. ``groups``: one for each worker. Gradients are added up in
    the order of the workers, in float32 at least, and rounded once. Raises :class:`UsageError` if the loss flags do not
    fit.
    """

    def __init__(
        self, config: LossyConfig, buckets: Sequence[BucketSpec], workers: int, steps: int | None = None
    ) -> None:
        check_refusals(config, Facts(in_memory=True))
        memory, self.groups = groups_in_memory(config, buckets, Stream(), range(workers), workers, steps)
        self._coded = memory.coded[0]

    @torch.no_grad()
    def reduce_scatter(
        self,
        bucket: int,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        step: int,
        averaged: bool = False,
    ) -> None:
        """Do the work of :func:`lossy_reduce_scatter` for all workers.

        ``outputs``: for each worker [shard]; they receive the recovered sum, or mean if ``averaged``. ``inputs``: for
        each worker [N * shard], changed in place.
        """
        if "grad" in self._coded:
            inputs = [whole.float() for whole in inputs]  # owners add up more than half precision can hold
        exchange = Exchange("grad", Stream(), step)
        transfers = []
        for group, whole, output in zip(self.groups, inputs, outputs, strict=True):
            transfers.append(group.reduce_scatter(Gradients(exchange, bucket, whole, output, averaged=averaged)))
        # The units that will not arrive have been removed from all inputs.
        for rank, output in enumerate(outputs):
            output.copy_(ordered_sum(torch.stack([whole.chunk(len(inputs))[rank] for whole in inputs]), averaged))
        for transfer in transfers:
            transfer.wait()

    @torch.no_grad()
    def all_gather(
        self, bucket: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], step: int
    ) -> None:
        """Do the work of :func:`lossy_all_gather` for all workers.

        ``outputs``: for each worker its replica [N * shard]; a unit that does not arrive keeps its old value.
        ``inputs``: for each worker the fresh values of its shard [shard], in its replica or not.
        """
        pairs = zip(self.groups, outputs, inputs, strict=True)
        transfers = [group.all_gather(bucket, replica, sent, step, nothing) for group, replica, sent in pairs]
        fresh = torch.cat(list(inputs))
        sent = fresh
        if "param" in self._coded:
            sent = fresh.clone()
            self._coded["param"].round_parameters(bucket, sent)
        for rank, replica in enumerate(outputs):
            replica.copy_(sent)
            if sent is not fresh:
                replica.chunk(len(outputs))[rank].copy_(fresh.chunk(len(outputs))[rank])
        for transfer, group, own in zip(transfers, self.groups, inputs, strict=True):
            transfer.wait()
            group.params[bucket].before_update(own)

    def finish_step(self, step: int, successful: bool) -> None:
        """Call :meth:`LossyGroup.finish_step` for all workers."""
        for group in self.groups:
            group.finish_step(step, successful)
