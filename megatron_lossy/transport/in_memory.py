"""All ranks of a group in one process: they exchange in memory, and no process group is needed.

    workers = LossyWorkers(LossyConfig(p_grad=0.1, p_param=0.1), [BucketSpec(shard)], 4)
    for step in range(steps):
        ...
        workers.reduce_scatter(0, grad_shards, grads, step)
        ...                                     # update every worker's own shard
        workers.all_gather(0, replicas, param_shards, step)

docs/transport.md has a whole program.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..base.exchange import Stream
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..recovery.base import ordered_sum
from .choice import BucketSpec, cut_buckets, shard_bytes
from .coded import coded_of
from .drawn import check_links
from .group import LossyGroup
from .memory import Memory
from .network import Network, consecutive_nodes


def groups_in_memory(
    config: LossyConfig, specs: Sequence[BucketSpec], stream: Stream, members: range, ranks: int, steps: int | None
) -> tuple[Memory, list[LossyGroup]]:
    """The memory that the workers ``members`` of ``ranks`` exchange through, and the group of each of them.

    ``steps``: length of the run, if known. Raises :class:`UsageError` if the loss flags do not fit.
    """
    cut = cut_buckets(config, specs)
    nodes = None
    if config.ranks_of_node is not None:
        nodes = consecutive_nodes(range(ranks), config.ranks_of_node)
    networks = {phase: Network(config, phase, ranks, nodes) for phase in PHASES}
    check_links(networks, stream, cut, len(members), steps)
    coded = [coded_of(config, cut, members, rank) for rank in range(len(members))]
    memory = Memory(networks, stream, members, cut, coded, shard_bytes(config, specs, cut))
    return memory, [LossyGroup(config, memory.worker(rank)) for rank in range(len(members))]


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
        """Does for all workers what :func:`lossy_reduce_scatter` does on one rank.

        ``outputs``: for each worker [shard]; they receive the recovered sum, or mean if ``averaged``. ``inputs``: for
        each worker [N * shard], changed in place.
        """
        if "grad" in self._coded:
            inputs = [whole.float() for whole in inputs]  # owners add up more than half precision can hold
        pairs = zip(self.groups, inputs, outputs, strict=True)
        transfers = [
            group.reduce_scatter(bucket, whole, output, step, _nothing, averaged) for group, whole, output in pairs
        ]
        # The units that will not arrive have been removed from all inputs.
        for rank, output in enumerate(outputs):
            parts = torch.stack([whole.chunk(len(inputs))[rank] for whole in inputs])
            output.copy_(ordered_sum(parts, averaged))
        for transfer in transfers:
            transfer.wait()

    @torch.no_grad()
    def all_gather(
        self, bucket: int, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], step: int
    ) -> None:
        """Does for all workers what :func:`lossy_all_gather` does on one rank.

        ``outputs``: for each worker its replica [N * shard]; a unit that does not arrive keeps its old value.
        ``inputs``: for each worker the fresh values of its shard [shard], in its replica or not.
        """
        pairs = zip(self.groups, outputs, inputs, strict=True)
        transfers = [group.all_gather(bucket, replica, sent, step, _nothing) for group, replica, sent in pairs]
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
        """Calls :meth:`LossyGroup.finish_step` for all workers."""
        for group in self.groups:
            group.finish_step(step, successful)


def _nothing() -> None:
    """Do nothing: all buffers are in this process."""
