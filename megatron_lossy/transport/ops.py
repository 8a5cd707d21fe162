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

from .group import Finish, LossyGroup


class LossyWork:
    """Handle of an asynchronous lossy collective: :meth:`wait` completes it, recovery included."""

    def __init__(self, work: dist.Work, finish: Finish | None, output: torch.Tensor) -> None:
        self._work: dist.Work | None = work
        self._finish = finish
        self._output = output

    def wait(self) -> None:
        """Wait until the output holds the result; a second call does nothing more."""
        if self._work is None:
            return
        # Only once: every wait of gloo's reduce-scatter copies the unrecovered result into the output again.
        work, self._work = self._work, None
        work.wait()
        if self._finish is not None:
            self._finish(self._output)


def _complete(work, finish, output, async_op: bool) -> LossyWork | None:
    if async_op:
        return LossyWork(work, finish, output)
    if finish is not None:
        finish(output)
    return None


def lossy_reduce_scatter(
    lossy: LossyGroup,
    bucket: int,
    output: torch.Tensor,
    input: torch.Tensor,
    step: int,
    op: dist.ReduceOp = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> LossyWork | None:
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
    finish = lossy.before_reduce_scatter(bucket, input, step, averaged)
    work = dist.reduce_scatter_tensor(output, input, op=op, group=group, async_op=async_op)
    return _complete(work, finish, output, async_op)


def lossy_all_gather(
    lossy: LossyGroup,
    bucket: int,
    output: torch.Tensor,
    input: torch.Tensor,
    step: int,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> LossyWork | None:
    """All-gather in which a unit that does not arrive keeps the value that ``output`` held before.

    Args:
        lossy: losses of ``group``.
        bucket: which of its buckets.
        output: [N * shard]; this rank's replica.
        input: [shard]; the owner's fresh values. May be the own part of ``output``.
        step: the iteration, from 0; the same on all ranks.
    """
    finish = lossy.before_all_gather(bucket, output, step)
    work = dist.all_gather_into_tensor(output, input, group=group, async_op=async_op)
    return _complete(work, finish, output, async_op)
