"""The gradient norm as N ranks compute it: each over its own shard, then the root of the sum of squares.

Up to rounding this is the norm of the whole gradient; with the same rounding, clipping scales by the same factor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def get_grad_norm_fp32(
    buffers: Sequence[torch.Tensor],
    workers: int,
    inside: int,
    original: Callable,
    grads_for_norm: Any,
    *args: Any,
    **kwargs: Any,
) -> float:
    """Wraps megatron-core's function of that name; gradients are views into ``buffers`` [N * shard].

    ``inside``: workers of a site, which add up their squares first.
    """
    shards: list[list[torch.Tensor]] = [[] for _ in range(workers)]
    for grad in grads_for_norm:
        for owner, piece in _pieces(grad, buffers, workers):
            shards[owner].append(piece)
    squares = torch.zeros([], dtype=torch.float32)
    for first in range(0, workers, inside):
        of_site = torch.zeros([], dtype=torch.float32)
        for shard in shards[first : first + inside]:
            of_site += original(shard, *args, **kwargs) ** 2
        squares += of_site
    return squares.item() ** 0.5


def _pieces(grad: torch.Tensor, buffers: Sequence[torch.Tensor], workers: int) -> list[tuple[int, torch.Tensor]]:
    """Parts of ``grad``, each with the rank that owns its shard."""
    for buffer in buffers:
        first = (grad.data_ptr() - buffer.data_ptr()) // buffer.element_size()
        if 0 <= first < buffer.numel() and grad.device == buffer.device:
            break
    else:
        raise RuntimeError("a gradient lies outside the gradient buffers")
    flat, shard, result, taken = grad.view(-1), buffer.numel() // workers, [], 0
    while taken < flat.numel():
        owner, offset = divmod(first + taken, shard)
        length = min(shard - offset, flat.numel() - taken)
        result.append((owner, flat[taken : taken + length]))
        taken += length
    return result
