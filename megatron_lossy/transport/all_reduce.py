"""An all-reduce of gradients that loses data: a reduce-scatter, and a gather of the reduced shards.

In the reduce-scatter owners recover losses as always. They then send the reduced gradient to all ranks. For a unit that
does not arrive, a rank keeps its own gradient, so that replicas drift apart (docs/corruption.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..recovery import Gradients
from .base import Transfer
from .choice import BucketSpec
from .group import LossyGroup

#: Runs a collective from ``input`` into ``output``. Returns its handle, or ``None`` if it has completed.
Carry = Callable[[torch.Tensor, torch.Tensor], Any]


def specs_of(gradients: Sequence[torch.Tensor], ranks: int) -> list[BucketSpec]:
    """Return the buckets of both halves. ``gradients``: those of each bucket, flat, without padding."""
    return [BucketSpec(_shard(flat, ranks), flat.dtype, flat.dtype) for flat in gradients]


def padded(gradient: torch.Tensor, ranks: int) -> torch.Tensor:
    """Return a copy of ``gradient`` [n], with zeros up to shards of equal size."""
    result = gradient.new_zeros(ranks * _shard(gradient, ranks))
    result[: len(gradient)] = gradient
    return result


def _shard(gradient: torch.Tensor, ranks: int) -> int:
    return -(-len(gradient) // ranks)


def begin_all_reduce(group: LossyGroup, x: Gradients, scatter: Carry, gather: Carry) -> Transfer:
    """Begin to all-reduce the gradients ``x``, whose buffer [n] changes in place. The wait for the result ends it.

    ``scatter(output, input)``, ``gather(output, input)``: run the collectives.
    """
    gradient, step = x.buffer, x.exchange.step
    sent = padded(gradient, group.size)
    result = sent.clone() if x.averaged else sent * group.size  # the sum as a rank estimates it from its own gradient
    own = torch.empty_like(result[: len(result) // group.size])
    transfer = group.reduce_scatter(replace(x, buffer=sent, output=own, collective=partial(scatter, own, sent)))

    def finish(_: Any) -> None:
        group.all_gather(x.bucket, result, own, step, partial(gather, result, own)).wait()
        gradient.copy_(result[: len(gradient)])

    return transfer.then(finish)
