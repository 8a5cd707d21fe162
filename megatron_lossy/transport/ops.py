"""Lossy reduce-scatter and all-gather for anybody's training loop; no Megatron needed.

    group = LossyGroup.create(LossyConfig(p_grad=0.1, p_param=0.1), [BucketSpec(shard=numel // world_size)])
    for step in range(steps):
        ...
        lossy_reduce_scatter(group, 0, grad_shard, grads, step)
        ...                                     # update the own shard of the parameters
        lossy_all_gather(group, 0, params, param_shard, step)
"""

from __future__ import annotations

import torch
import torch.distributed as dist

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
    """Reduce-scatter of which some units do not arrive, with the configured recovery.

    Args:
        lossy: losses and recovery of ``group``.
        bucket: which of its buckets.
        output: [shard], any floating dtype; receives the recovered sum (SUM) or mean (AVG) of this rank's shard. May
            be the own part of ``input``.
        input: [N * shard], same dtype; what will not arrive is removed from it in place.
        step: the iteration, from 0; the same on all ranks.
    """
    averaged = op == dist.ReduceOp.AVG
    if not averaged and op != dist.ReduceOp.SUM:
        raise ValueError(f"op {op}: must be ReduceOp.SUM or ReduceOp.AVG")

    def collective() -> dist.Work | None:
        return dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)

    return _finish(lossy.reduce_scatter(bucket, input, output, step, collective, averaged), async_op)


def lossy_all_gather(
    lossy: LossyGroup,
    bucket: int,
    output: torch.Tensor,
    input: torch.Tensor,
    step: int,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Transfer | None:
    """All-gather in which a unit that does not arrive keeps the value that ``output`` held before.

    Args:
        lossy: losses of ``group``.
        bucket: which of its buckets.
        output: [N * shard]; this rank's replica.
        input: [shard]; the owner's fresh values. May be the own part of ``output``.
        step: the iteration, from 0; the same on all ranks.
    """

    def collective() -> dist.Work | None:
        return dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)

    return _finish(lossy.all_gather(bucket, output, step, collective), async_op)


def _finish(transfer: Transfer, async_op: bool) -> Transfer | None:
    if async_op:
        return transfer
    transfer.wait()
    return None
