"""An all-reduce of the gradients of full replicas that loses data.

It is a reduce-scatter followed by a gather. In the reduce-scatter owners recover losses as always. They then send the
reduced gradient to all ranks. For a unit that does not arrive, a rank keeps its own gradient, so that replicas drift
apart (docs/corruption.md).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ...device.collectives import all_gather_single, reduce_scatter_single
from ...hooks.seam import Slot, begun, slot_of
from ...ledger import Patch
from ...run import Run
from ...transport import Transfer


def shard_size(elements: int, ranks: int) -> int:
    """Elements of a shard of a bucket that is not padded."""
    return -(-elements // ranks)


def begin(
    run: Run, slot: Slot, gradient: torch.Tensor, averaged: bool, scatter: Callable, gather: Callable
) -> Transfer:
    """Begin to all-reduce ``gradient`` [n], scaled as Megatron scales it, in place. The wait for the result ends it.

    ``scatter(output, input)``, ``gather(output, input)``: run the collectives. ``averaged``: they give a mean.
    """
    group, number = slot.group, slot.bucket
    padded = gradient.new_zeros(group.size * shard_size(len(gradient), group.size))
    padded[: len(gradient)] = gradient
    result = padded.clone() if averaged else padded * group.size  # the sum as a rank estimates it from its own gradient
    own = torch.empty_like(result[: len(result) // group.size])
    transfer = group.reduce_scatter(
        number, padded, own, run.iteration, lambda: scatter(own, padded), averaged, run.loss_scale(), run.following
    )

    def finish(_: Any) -> None:
        group.all_gather(number, result, own, run.iteration, lambda: gather(result, own)).wait()
        gradient.copy_(result[: len(gradient)])

    return transfer.then(finish)


def all_reduce(
    run: Run,
    original: Callable,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Any:
    """Replaces ``torch.distributed.all_reduce``: gradients of full replicas lose units in the group of their slot."""
    slot = slot_of(tensor)
    if slot is None or slot.group.lossless("grad"):
        return original(tensor, op=op, group=group, async_op=async_op)

    def scatter(output: torch.Tensor, input: torch.Tensor) -> Any:
        return reduce_scatter_single(output, input, op=op, group=group, async_op=async_op)

    def gather(output: torch.Tensor, input: torch.Tensor) -> Any:
        return all_gather_single(output, input, group=group, async_op=True)

    return begun(begin(run, slot, tensor, op == dist.ReduceOp.AVG, scatter, gather))


class _Changed(types.ModuleType):
    """A module with some attributes of its own, and all others of ``original``."""

    def __init__(self, original: types.ModuleType, **own: Any) -> None:
        super().__init__(original.__name__)
        self.__dict__.update(own, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_original"], name)


def patch(run: Run) -> Patch:
    """The patch that ``--p-grad`` needs in megatron-core without the distributed optimizer."""

    def changed(original: Any) -> Any:
        def lossy(*args: Any, **kwargs: Any) -> Any:
            return all_reduce(run, original.distributed.all_reduce, *args, **kwargs)

        return _Changed(original, distributed=_Changed(original.distributed, all_reduce=lossy))

    return Patch(
        target="megatron.core.distributed.param_and_grad_buffer:torch",
        make=changed,
        why="this module's all-reduce of gradients, and no other, becomes one that loses data",
        versions="all",
        until="Megatron calls its all-reduce by a name of its own",
    )
