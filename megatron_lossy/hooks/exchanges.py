"""The groups that exchange Megatron's buckets: their members, their losses and their buffers; and checks that all do."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base.errors import UsageError
from ..base.exchange import Stream
from ..channel.corruption import Corruption
from ..config import PHASES, LossyConfig
from ..config.transport import OBSERVED
from ..transport import BucketSpec, LossyGroup, Network, check_average, find_nodes
from ..transport.sites import Scalars, Sites, make_group
from .buckets import apart, buckets_by_stream, errors_of_owner, replicated_units
from .seam import Slot, attach, slot_of
from .versions import optimizers, pipeline_stage, tensor_group

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


class Exchanges:
    """Makes the groups of this process.

    ``job``: the number of this training job, and the number of equal jobs; no two lose the same.
    """

    def __init__(self, config: LossyConfig, job: tuple[int, int], corruption: Corruption) -> None:
        self.config = config
        #: The node of each rank of the world, with ``--lossy-links inter-node``; ``None`` until they are found.
        self.nodes: list[int] | None = None
        self._job, self._jobs = job
        self._corruption = corruption
        self._networks: dict[tuple[str, tuple[int, ...]], Network] = {}
        self._sites, self._of_scalars = Sites(config.sites), Sites(config.sites)
        self.scalars = Scalars(self._of_scalars)

    def find_nodes(self) -> bool:
        """Find :attr:`nodes` if they are needed and not known; returns whether it found them. A collective call."""
        if self.config.ranks_of_node is None or self.nodes is not None:
            return False
        self.nodes = find_nodes(None, self.config.ranks_of_node)
        return True

    def on_one_node(self, peer: int) -> bool:
        """Return whether ``peer`` is on the node of this rank; false if nodes do not matter."""
        return self.nodes is not None and self.nodes[dist.get_rank()] == self.nodes[peer]

    def of_shards(self, ddp: DistributedDataParallel, steps: int | None) -> list[LossyGroup]:
        """Return the groups of a model chunk with a distributed optimizer, one for each stream. A collective call.

        ``steps``: length of the run, if known, to refuse a trace that is too short.
        """
        stage, streams = pipeline_stage(ddp), buckets_by_stream(ddp)
        groups = [pairs[0][0].data_parallel_group for _, _, pairs in streams]
        self._sites.open(groups)
        self._of_scalars.open([dist.group.WORLD, *groups])
        return [self._of_stream(*found, stage, steps) for found in streams]

    def _of_stream(
        self, stream: Stream, full: dist.ProcessGroup, buckets: Sequence[tuple[Any, Any]], stage: int, steps: int | None
    ) -> LossyGroup:
        config = self.config
        if config.within in OBSERVED or "trace" in map(config.model, PHASES):
            stream = apart(stream, stage, tensor_group(stream.kind == "expert"))
        part = buckets[0][0].data_parallel_group  # of one optimizer instance
        if buckets[0][0].ddp_config.average_in_collective and not config.untouched("grad"):
            check_average("--ddp-average-in-collective", part)
        ranks = dist.get_process_group_ranks(full)
        members = [self._job * len(ranks) + ranks.index(rank) for rank in dist.get_process_group_ranks(part)]
        owner, specs = members[dist.get_rank(part)], specs_of(buckets, len(members))
        networks = {phase: self._network(phase, ranks) for phase in PHASES}
        group = make_group(config, specs, networks, members, stream, steps, part, self._sites.of(part))
        share_copies(group, buckets)
        for number, (_, bucket) in enumerate(buckets):
            attach(bucket.grad_data, Slot(group, number))
            attach(bucket.param_data, Slot(group, number))
        if config.errs and len(ranks) > 1:
            group.errors = errors_of_owner(self._corruption, group.stream, buckets, group.shards, group.own, owner)
        return group

    def _network(self, phase: str, ranks: list[int]) -> Network:
        key = (phase, tuple(ranks))
        if key not in self._networks:
            size = self.config.members(self._jobs * len(ranks))
            nodes = None if self.nodes is None else [self.nodes[rank] for rank in ranks]
            self._networks[key] = Network(self.config, phase, size, nodes)
        return self._networks[key]


def specs_of(pairs: Sequence[tuple[Any, Any]], shards: int) -> list[BucketSpec]:
    """Return Megatron's buckets, (buffer, bucket), each in ``shards`` equal shards."""
    buckets = [(bucket.grad_data, bucket.param_data) for _, bucket in pairs]
    return [BucketSpec(grad.numel() // shards, grad.dtype, param.dtype) for grad, param in buckets]


def share_copies(group: LossyGroup, pairs: Sequence[tuple[Any, Any]]) -> None:
    """Let ``group`` lose the same of copies that every tensor-parallel rank has. ``pairs``: its (buffer, bucket)."""
    tensor = tensor_group(group.stream.kind == "expert")
    if tensor is None:
        return
    for number, (buffer, bucket) in enumerate(pairs):
        cut = {phase: group.wire.cut[phase][number] for phase in PHASES}
        whole = {phase: replicated_units(buffer, bucket, units, group.shards) for phase, units in cut.items()}
        copies = {phase: units[group.place :: group.ranks] for phase, units in whole.items()}
        group.share_copies(number, copies, tensor)


# --- loss that never happens must not go unnoticed -------------------------------------------------------------------


def check_registered(optimizer: Any, chunks: Sequence[Any]) -> None:
    """Raise :class:`UsageError` if ``optimizer`` updates unknown buckets. ``chunks``: the models with hooks."""
    if not chunks and any(group["params"] for group in getattr(optimizer, "param_groups", ())):
        raise UsageError(
            "no model was wrapped in Megatron's DistributedDataParallel since the hooks were installed, so that nothing "
            "can be lost: call hooks.install() before the model is wrapped"
        )
    for buffer in (buffer for part in optimizers(optimizer) for buffer in getattr(part, "buffers", ())):
        for number, bucket in enumerate(buffer.buckets):
            if slot_of(bucket.grad_data) is None or slot_of(bucket.param_data) is None:
                raise UsageError(
                    f"bucket {number} ({bucket.grad_data.numel()} elements) of the optimizer is not known to the hooks, so "
                    "that it would lose nothing: call hooks.install() before any part of the model is wrapped in DDP"
                )


def warn_of_lossless(config: LossyConfig, groups: Sequence[LossyGroup]) -> None:
    """Say, on the first rank of each group, which streams can lose nothing although their rate is not 0."""
    for phase in PHASES:
        if config.untouched(phase):
            continue
        for group in groups:
            if group.lossless(phase) and group.rank == 0 and group.wire.members[0] == 0:
                near = "all ranks of its group are on one node (--lossy-links inter-node)"
                why = "its group has one rank" if group.size == 1 else near
                logger.warning("nothing of %s is lost in phase %s: %s", group.stream.name, phase, why)


def check_exchanged(groups: Sequence[LossyGroup], phase: str, step: int) -> None:
    """Raise ``RuntimeError`` unless every bucket that can lose something was exchanged in ``step``."""
    for group in groups:
        buckets = group.not_made(phase, step)
        if buckets:
            what = {"grad": "gradients", "param": "parameters"}[phase]
            raise RuntimeError(
                f"the {what} of bucket {buckets[0]} of {group.stream.name} were not exchanged in iteration {step + 1}, or not "
                f"through the hooks, and {len(buckets) - 1} more. They would lose nothing."
            )
