"""Main weights: the optimizer's float32 weights, whose copies in the buffers that are sent may have 16 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..base.errors import UsageError


def main_pieces(optimizers: Iterable[Any], bucket: Any, own: torch.Tensor, flag: str) -> list[tuple[int, torch.Tensor]]:
    """Return (offset, float32 weight) for each weight of ``optimizers`` that ``own`` copies, without padding.

    ``flag``: needs them. Raise :class:`UsageError` where an optimizer keeps such weights to itself.
    """
    first = (own.data_ptr() - bucket.param_data.data_ptr()) // own.element_size()
    pieces = []
    for optimizer in optimizers:
        groups = zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups, strict=True)
        for parameter, main in ((p, m) for group in groups for p, m in zip(*group, strict=True)):
            number, _, of_bucket = optimizer.model_param_gbuf_map[parameter]
            if optimizer.buffers[number].buckets[of_bucket] is not bucket:
                continue
            if main is None:
                raise UsageError(
                    f"{flag} with --use-precision-aware-optimizer: the optimizer keeps its float32 weights to itself; turn "
                    "one off"
                )
            start = optimizer._get_model_param_range_map(parameter)["gbuf_world_in_bucket"].start
            pieces.append((start - first, main.detach()))
    return pieces
