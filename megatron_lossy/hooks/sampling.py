"""Megatron's buckets, as monitors sample them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from ..run.sampling import RankSampler, Used
from ..transport import LossyGroup
from .buckets import used_ranges


def sampler_of(group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]) -> RankSampler:
    """The parameter buckets of ``group``. ``pairs``: Megatron's (buffer, bucket) in canonical order."""
    replicas = [group.view(bucket.param_data) for _, bucket in pairs]
    return RankSampler(group, process_group, replicas, used_in(pairs, group))


def used_in(pairs: Sequence[tuple[Any, Any]], group: LossyGroup) -> Used:
    """Finds the places of parameters in ``pairs`` of Megatron's (buffer, bucket), as ``group`` exchanges them."""

    def used() -> list[np.ndarray]:
        shards = [bucket.param_data.numel() // group.shards for _, bucket in pairs]
        return [
            group.seen(used_ranges(buffer, bucket), shard)
            for (buffer, bucket), shard in zip(pairs, shards, strict=True)
        ]

    return used
