"""The groups that exchange Megatron's buckets: their members, their losses and their buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..channel.corruption import Corruption
from ..config import PHASES, LossyConfig
from ..exchange import Stream
from ..mechanisms.replicas.lossy_all_reduce import shard_size
from ..mechanisms.replicas.ranks import ReplicaStream, errors_of_owner
from ..transport import BucketSpec, LossyGroup, Network, check_average, find_nodes
from .buckets import apart, buckets_by_stream, replicated_units
from .seam import Slot, attach
from .versions import pipeline_stage, tensor_group

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel


class Exchanges:
    """Makes the groups of this process.

    ``job``: the number of this training job, and the number of equal jobs; no two lose the same.
    """

    def __init__(self, config: LossyConfig, job: tuple[int, int], corruption: Corruption | None) -> None:
        self.config = config
        #: The node of each rank of the world, with ``--lossy-links inter-node``; ``None`` until they are found.
        self.nodes: list[int] | None = None
        self._job, self._jobs = job
        self._corruption = corruption
        self._networks: dict[tuple[str, tuple[int, ...]], Network] = {}

    def find_nodes(self) -> bool:
        """Find :attr:`nodes` if they are needed and not known; returns whether it found them. A collective call."""
        if self.config.ranks_of_node is None or self.nodes is not None:
            return False
        self.nodes = find_nodes(None, self.config.ranks_of_node)
        return True

    def on_one_node(self, peer: int) -> bool:
        """Whether ``peer`` is on the node of this rank; false if nodes do not matter."""
        return self.nodes is not None and self.nodes[dist.get_rank()] == self.nodes[peer]

    def of_shards(self, ddp: DistributedDataParallel, steps: int | None) -> list[LossyGroup]:
        """The groups of a model chunk whose optimizer is distributed, one for each of its streams. A collective call.

        ``steps``: length of the run, if known, to refuse a trace that is too short.
        """
        streams, stage = buckets_by_stream(ddp), pipeline_stage(ddp)
        return [self._of_stream(buckets, full, stream, stage, steps) for stream, full, buckets in streams]

    def of_replica(self, one: ReplicaStream, steps: int | None) -> LossyGroup:
        """The group of the all-reduces of a stream of full replicas. A collective call. See :meth:`of_shards`."""
        config, size, rank = self.config.all_reduced(), one.group.size(), one.group.rank()
        nodes = self._nodes_of(dist.get_process_group_ranks(one.group))
        networks = {phase: Network(config, phase, size, nodes) for phase in PHASES}
        gradients = [bucket.grad_data for bucket in one.buckets]
        specs = [BucketSpec(shard_size(len(flat), size), flat.dtype, flat.dtype) for flat in gradients]
        group = LossyGroup.among(config, specs, networks, range(size), rank, one.stream, steps, one.group)
        _share_copies(group, one.pairs, tensor_group(one.stream.kind == "expert"))
        for number, flat in enumerate(gradients):
            attach(flat, Slot(group, number))
        return group

    def _of_stream(
        self,
        buckets: Sequence[tuple[Any, Any]],
        full: dist.ProcessGroup,
        stream: Stream,
        stage: int,
        steps: int | None,
    ) -> LossyGroup:
        config, tensor = self.config, tensor_group(stream.kind == "expert")
        if config.transport == "udp" or "trace" in map(config.model, PHASES):
            stream = apart(stream, stage, tensor)
        part = buckets[0][0].data_parallel_group  # of one optimizer instance
        if buckets[0][0].ddp_config.average_in_collective and not config.untouched("grad"):
            check_average("--ddp-average-in-collective", part)
        ranks = dist.get_process_group_ranks(full)
        members = [self._job * len(ranks) + ranks.index(rank) for rank in dist.get_process_group_ranks(part)]
        specs = [
            BucketSpec(bucket.grad_data.numel() // len(members), bucket.grad_data.dtype, bucket.param_data.dtype)
            for _, bucket in buckets
        ]
        networks = {phase: self._network(phase, ranks) for phase in PHASES}
        group = LossyGroup.among(config, specs, networks, members, dist.get_rank(part), stream, steps, part)
        _share_copies(group, buckets, tensor)
        for number, (_, bucket) in enumerate(buckets):
            attach(bucket.grad_data, Slot(group, number))
            attach(bucket.param_data, Slot(group, number))
        if config.errs and len(ranks) > 1:
            owner = members[group.rank]
            group.errors = errors_of_owner(config, self._corruption, stream, buckets, len(members), group.rank, owner)
        return group

    def _network(self, phase: str, ranks: list[int]) -> Network:
        key = (phase, tuple(ranks))
        if key not in self._networks:
            self._networks[key] = Network(self.config, phase, self._jobs * len(ranks), self._nodes_of(ranks))
        return self._networks[key]

    def _nodes_of(self, ranks: Sequence[int]) -> list[int] | None:
        return None if self.nodes is None else [self.nodes[rank] for rank in ranks]


def _share_copies(group: LossyGroup, pairs: Sequence[tuple[Any, Any]], tensor: dist.ProcessGroup | None) -> None:
    if tensor is None:
        return
    for number, (buffer, bucket) in enumerate(pairs):
        cut = {phase: group.wire.cut[phase][number] for phase in PHASES}
        copies = {phase: replicated_units(buffer, bucket, units, group.size) for phase, units in cut.items()}
        group.share_copies(number, copies, tensor)
