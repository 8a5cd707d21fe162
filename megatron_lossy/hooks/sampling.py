"""Megatron's buckets, as monitors sample them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..run.sampling import RankSampler, Used
from ..transport import LossyGroup
from .buckets import used_ranges


def sampler_of(group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]) -> RankSampler:
    """The parameter buckets of ``group``. ``pairs``: Megatron's (buffer, bucket) in canonical order."""
    return RankSampler(group, process_group, [bucket.param_data for _, bucket in pairs], used_in(pairs))


def used_in(pairs: Sequence[tuple[Any, Any]]) -> Used:
    """Finds the places of parameters in ``pairs`` of Megatron's (buffer, bucket)."""
    return lambda: [used_ranges(buffer, bucket) for buffer, bucket in pairs]
