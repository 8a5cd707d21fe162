"""Lossy reduce-scatter and all-gather for any training loop. They need no Megatron.

    group = LossyGroup.create(LossyConfig(p_grad=0.1, p_param=0.1), [BucketSpec(shard=numel // world_size)])
    for step in range(steps):
        ...
        lossy_reduce_scatter(group, 0, grad_shard, grads, step)
        ...                                     # update the own shard of the parameters
        lossy_all_gather(group, 0, params, param_shard, step)

docs/start.md has a whole program.
"""

from __future__ import annotations

import weakref
from functools import partial

import torch
import torch.distributed as dist

from ..base.device import all_gather_single, reduce_scatter_single
from ..base.errors import refuse
from ..base.exchange import Exchange
from ..recovery import Gradients
from .base import Transfer
from .group import LossyGroup


def lossy_reduce_scatter(
    lossy: LossyGroup,
    bucket: int,
    output: torch.Tensor,
    input: torch.Tensor,
    step: int,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Transfer | None:
    """Run a reduce-scatter that may lose units.

    A step counts when a later one begins, when the state of ``lossy`` is saved, and when ``lossy`` is closed. If the
    result of a step is not used, call ``lossy.finish_step(step, False)`` before the next one.

    Args:
        lossy: decides which units ``group`` loses, and how the result is recovered.
        bucket: the number of the bucket.
        output: [shard], of any floating dtype. It receives the recovered sum (SUM, the default) or mean (AVG) of this
            rank's shard. It may be this rank's part of ``input``.
        input: [N * shard], of the same dtype. It is changed in place: units that will not arrive are removed from it.
        step: the iteration, from 0. It must be the same on all ranks, and grow.
    """
    averaged = op == dist.ReduceOp.AVG
    if not averaged and op != dist.ReduceOp.SUM:
        raise ValueError(f"op {op}: must be ReduceOp.SUM or ReduceOp.AVG")
    if averaged:
        check_average("op=ReduceOp.AVG", group)
    collective = partial(reduce_scatter_single, output, input, op=op, group=group, async_op=async_op)
    x = Gradients(Exchange("grad", lossy.stream, step), bucket, input, output, collective, averaged)
    transfer = lossy.reduce_scatter(x)
    return _finish(transfer.then(lambda _: lossy.keep_lost(bucket, step)), async_op)


_averages: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def check_average(flag: str, group: dist.ProcessGroup | None) -> None:
    """Raise :class:`UsageError`, naming ``flag``, if a reduce-scatter of ``group`` does not average.

    Gloo of older versions of torch sums instead, without a word. The first call for a group is a collective call.
    """
    group = group or dist.group.WORLD
    if dist.get_backend(group) != "gloo" or group in _averages:
        return
    mean = torch.empty(1)
    reduce_scatter_single(mean, torch.ones(dist.get_world_size(group)), op=dist.ReduceOp.AVG, group=group)
    if mean.item() != 1:
        raise refuse(flag, "over gloo", f"torch {torch.__version__} sums instead of averaging; do without")
    _averages.add(group)


def lossy_all_gather(
    lossy: LossyGroup,
    bucket: int,
    output: torch.Tensor,
    input: torch.Tensor,
    step: int,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Transfer | None:
    """Run an all-gather that may lose units: a lost unit of ``output`` keeps its old value.

    Args:
        lossy: decides which units ``group`` loses.
        bucket: the number of the bucket.
        output: [N * shard], this rank's replica.
        input: [shard], the fresh values of this rank's shard. It may be this rank's part of ``output``.
        step: the iteration, from 0. It must be the same on all ranks.
    """
    collective = partial(all_gather_single, output, input, group=group, async_op=async_op)
    transfer = lossy.all_gather(bucket, output, input, step, collective)
    return _finish(transfer.then(lambda _: lossy.params[bucket].before_update(input)), async_op)


def _finish(transfer: Transfer, async_op: bool) -> Transfer | None:
    if async_op:
        return transfer
    transfer.wait()
    return None
