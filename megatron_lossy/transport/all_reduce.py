"""An all-reduce of gradients that loses data: a reduce-scatter, and a gather of the reduced shards.

In the reduce-scatter owners recover losses as always. They then send the reduced gradient to all ranks. For a unit that
does not arrive, a rank keeps its own gradient, so that replicas drift apart (docs/corruption.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..recovery.base import LossScale, unscaled
from .base import Transfer
from .choice import BucketSpec
from .group import LossyGroup

#: Runs a collective from ``input`` into ``output``. Returns its handle, or ``None`` if it has completed.
Carry = Callable[[torch.Tensor, torch.Tensor], Any]


def specs_of(gradients: Sequence[torch.Tensor], ranks: int) -> list[BucketSpec]:
    """The buckets of both halves. ``gradients``: those of each bucket, flat, without padding."""
    return [BucketSpec(_shard(flat, ranks), flat.dtype, flat.dtype) for flat in gradients]


def padded(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """A copy of ``gradient`` [n], with zeros up to shards of equal size."""
    result = gradient.new_zeros(ranks * _shard(gradient, ranks))
    result[: len(gradient)] = gradient
    return result


def _shard(gradient: torch.Tensor, ranks: int) -> int:
    return -(-len(gradient) // ranks)


def begin_all_reduce(
    group: LossyGroup,
    bucket: int,
    gradient: torch.Tensor,
    step: int,
    scatter: Carry,
    gather: Carry,
    averaged: bool = False,
    loss_scale: LossScale = unscaled,
    gapless: bool = False,
) -> Transfer:
    """Begin to all-reduce ``gradient`` [n], in place. The wait for the result ends it.

    ``scatter(output, input)``, ``gather(output, input)``: run the collectives. ``averaged``: they give a mean. The other
    arguments are those of :meth:`LossyGroup.reduce_scatter`.
    """
    sent = padded(gradient, group.size)
    result = sent.clone() if averaged else sent * group.size  # the sum as a rank estimates it from its own gradient
    own = torch.empty_like(result[: len(result) // group.size])
    transfer = group.reduce_scatter(bucket, sent, own, step, lambda: scatter(own, sent), averaged, loss_scale, gapless)

    def finish(_: Any) -> None:
        group.all_gather(bucket, result, own, step, lambda: gather(result, own)).wait()
        gradient.copy_(result[: len(gradient)])

    return transfer.then(finish)
