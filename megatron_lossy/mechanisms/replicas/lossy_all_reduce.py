"""Megatron's all-reduce of the gradients of full replicas, which loses data (:mod:`megatron_lossy.transport.all_reduce`)."""

from __future__ import annotations

import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...base.device import all_gather_single, reduce_scatter_single
from ...base.exchange import Exchange
from ...base.ledger import Patch
from ...config import PHASES
from ...hooks.exchanges import Exchanges, share_copies
from ...hooks.seam import Slot, attach, begun, slot_of
from ...recovery import Gradients
from ...recovery.base import nothing
from ...run.base import Run
from ...transport import LossyGroup, Network, wire_for
from ...transport.all_reduce import begin_all_reduce, specs_of
from .streams import ReplicaStream


def group_of(exchanges: Exchanges, one: ReplicaStream, steps: int | None) -> LossyGroup:
    """Return the group of a stream's all-reduces. A collective call. ``steps``: see :meth:`.Exchanges.of_shards`."""
    config, size, rank = exchanges.config.all_reduced(), one.group.size(), one.group.rank()
    nodes = exchanges.nodes_of(dist.get_process_group_ranks(one.group))
    networks = {phase: Network(config, phase, size, nodes) for phase in PHASES}
    gradients = [bucket.grad_data for bucket in one.buckets]
    specs = specs_of(gradients, size)
    group = LossyGroup(config, wire_for(config, specs, networks, range(size), rank, one.stream, steps, one.group))
    share_copies(group, one.pairs)
    for number, flat in enumerate(gradients):
        attach(flat, Slot(group, number))
    return group


def all_reduce(
    run: Run,
    original: Callable,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Take the place of ``torch.distributed.all_reduce``: full replicas' gradients lose units in their slot's group."""
    slot = slot_of(tensor)
    if slot is None or slot.group.lossless("grad"):
        return original(tensor, op=op, group=group, async_op=async_op)
    exchange, averaged = Exchange("grad", slot.group.stream, run.iteration), op == dist.ReduceOp.AVG
    x = Gradients(exchange, slot.bucket, tensor, tensor, nothing, averaged, run.loss_scale, run.gapless)
    scatter = partial(reduce_scatter_single, op=op, group=group, async_op=async_op)
    gather = partial(all_gather_single, group=group, async_op=True)
    return begun(begin_all_reduce(slot.group, x, scatter, gather))


class _PatchedModule(types.ModuleType):
    """A module with some attributes of its own, and all others of ``original``."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def patch(run: Run) -> Patch:
    """Return the patch that ``--p-grad`` needs in megatron-core without the distributed optimizer."""

    def changed(original: Any) -> Any:
        def lossy(*args: Any, **kwargs: Any) -> Any:
            return all_reduce(run, original.distributed.all_reduce, *args, **kwargs)

        return _PatchedModule(original, distributed=_PatchedModule(original.distributed, all_reduce=lossy))

    return Patch(
        target="megatron.core.distributed.param_and_grad_buffer:torch",
        make=changed,
        why="this module's all-reduce of gradients, and no other, becomes one that loses data",
    )
