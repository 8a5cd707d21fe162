"""Values of the ranks' replicas of Megatron's buckets, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..run.sampling import RankSampler
from ..transport import LossyGroup
from .buckets import used_ranges


def sampler_of(group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]) -> RankSampler:
    """The parameter buckets of ``group``. ``pairs``: Megatron's (buffer, bucket) in canonical order."""
    replicas = [bucket.param_data for _, bucket in pairs]
    return RankSampler(
        group, process_group, replicas, lambda: [used_ranges(buffer, bucket) for buffer, bucket in pairs]
    )
