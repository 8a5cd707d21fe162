"""The lossy exchanges of the buckets that one process group shards.

:class:`LossyGroup` knows what is lost and what to do about it, before and after a collective that somebody else
runs (Megatron's, or :mod:`megatron_lossy.transport.ops`). Nothing extra is communicated.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..config import PHASES, LossyConfig
from ..exchange import Exchange, Observation, Stream, cut
from ..recovery import GRAD_RECOVERIES, Outcome, rows_for
from .network import Deliveries, Network

#: Called with the collective's output once it has arrived.
Finish = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: elements of one of its N shards, and the dtypes that cross the wire."""

    shard: int
    grad_dtype: torch.dtype = torch.float32
    param_dtype: torch.dtype = torch.float32


def find_nodes(group: dist.ProcessGroup | None, ranks_per_node: int = 0) -> list[int]:
    """The node number of every rank of ``group``.

    By host name (a collective call), or by ``ranks_per_node`` consecutive global ranks (``--ranks-per-node``).
    """
    group = group or dist.group.WORLD
    if ranks_per_node:
        return [rank // ranks_per_node for rank in dist.get_process_group_ranks(group)]
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return [hosts.index(host) for host in hosts]


class LossyGroup:
    """Losses and recovery of a list of buckets, in canonical order, over one group.

    Args:
        config: the loss flags.
        buckets: the buckets; all ranks of the group must give the same list.
        networks: for each phase the losses between the ranks of the full group.
        members: the group's ranks within the full group.
        rank: this process's rank in the group.
        stream: what the buckets belong to.
        steps: length of the run, if known, to refuse a trace that is too short.
        make_deliveries: what draws the losses that ``rank`` sees.

    Raises :class:`UsageError` if the channel cannot serve the group or a packet is smaller than an element.
    """

    def __init__(
        self,
        config: LossyConfig,
        buckets: Sequence[BucketSpec],
        networks: dict[str, Network],
        members: Sequence[int],
        rank: int,
        stream: Stream = Stream(),
        steps: int | None = None,
        make_deliveries: Callable[..., Deliveries] = Deliveries,
    ) -> None:
        self.rank = rank
        self.size = len(members)
        self.stream = stream
        shards = [bucket.shard for bucket in buckets]
        self.units, self.deliveries = {}, {}
        for phase in PHASES:
            itemsizes = [getattr(bucket, f"{phase}_dtype").itemsize for bucket in buckets]
            self.units[phase], total = cut(shards, itemsizes, config.loss_unit, config.packet_bytes)
            deliveries = make_deliveries(networks[phase], stream, members, rank, total)
            if not deliveries.lossless:
                networks[phase].channel.check(phase, stream, networks[phase].size, total, steps)
            self.deliveries[phase] = deliveries
        self.recoveries = [GRAD_RECOVERIES[config.grad_recovery](units) for units in self.units["grad"]]

    @classmethod
    def create(
        cls,
        config: LossyConfig,
        buckets: Sequence[BucketSpec],
        group: dist.ProcessGroup | None = None,
        stream: Stream = Stream(),
        steps: int | None = None,
    ) -> LossyGroup:
        """A lossy group over a whole torch process group (default: the world). Call it on all its ranks."""
        nodes = find_nodes(group, config.ranks_per_node) if config.lossy_links == "inter-node" else None
        size = dist.get_world_size(group)
        networks = {phase: Network(config, phase, size, nodes) for phase in PHASES}
        return cls(config, buckets, networks, range(size), dist.get_rank(group), stream, steps)

    def before_reduce_scatter(
        self,
        bucket: int,
        buffer: torch.Tensor,
        step: int,
        averaged: bool = False,
        loss_scale: torch.Tensor | float | None = None,
    ) -> Finish | None:
        """Remove from ``buffer`` [N * shard], the input of a reduce-scatter, what will not arrive.

        Returns what must be called with the reduced shard, or ``None`` if nothing is to be done. ``averaged``: the
        collective divides by N (``ReduceOp.AVG``). ``loss_scale``: what the gradients were multiplied with.
        """
        deliveries = self.deliveries["grad"]
        if deliveries.lossless:
            return None
        recovery = self.recoveries[bucket]
        numbers = recovery.units.numbers
        outcome = Outcome(
            step,
            self.rank,
            deliveries.outgoing(step)[:, numbers],
            deliveries.incoming(step)[:, numbers],
            lambda: deliveries.upcoming(step + 1)[:, numbers],
            averaged,
            loss_scale,
        )
        sent = recovery.send(buffer, outcome)
        return lambda shard: recovery.receive(shard, outcome, sent)

    def before_all_gather(self, bucket: int, buffer: torch.Tensor, step: int) -> Finish | None:
        """Put aside what of ``buffer`` [N * shard], the output of an all-gather, must survive it: the stale units.

        Returns what must be called with the same buffer when the gather has arrived, or ``None``.
        """
        lost = self.stale(bucket, step)
        if lost is None or (not lost.any() and buffer.device.type != "hpu"):
            return None
        units = self.units["param"][bucket]
        rows = rows_for(buffer.device)
        saved = rows.take(buffer, units, lost)
        return lambda gathered: rows.put_(gathered, units, lost, saved)

    def stale(self, bucket: int, step: int) -> np.ndarray | None:
        """bool[N, count]: units of the bucket that this rank missed in the broadcast of ``step``."""
        deliveries = self.deliveries["param"]
        if deliveries.lossless:
            return None
        return ~deliveries.incoming(step)[:, self.units["param"][bucket].numbers]

    def prepare(self, step: int) -> None:
        """Draw the outcomes of ``step`` ahead of time, on another thread, if that is much work."""
        self.deliveries["grad"].prepare(step, outgoing=True)
        self.deliveries["grad"].prepare(step, outgoing=False)
        self.deliveries["param"].prepare(step, outgoing=False)

    def finish_step(self, step: int, successful: bool) -> None:
        """Tell the recovery rules whether the optimizer used the gradients of ``step``."""
        for recovery in self.recoveries:
            recovery.finish_step(step, successful)

    def observation(self, phase: str, step: int) -> Observation | None:
        """What arrived at this rank in ``step``; ``None`` in a phase without loss."""
        deliveries = self.deliveries[phase]
        if deliveries.lossless:
            return None
        return Observation(
            Exchange(phase, self.stream, step),
            deliveries.members,
            deliveries.members[self.rank : self.rank + 1],
            deliveries.incoming(step)[None],
            self.units[phase],
        )
