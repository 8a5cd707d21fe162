"""The errors that hit the reduced gradients in Megatron's buckets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..base.exchange import Stream
from ..channel.corruption import Corruption, Errors, check_bits
from ..transport.peers import RankPeers
from .buckets import used_ranges
from .versions import tensor_group


def errors_in(
    corruption: Corruption, stream: Stream, buckets: Sequence[Any], ranges: Sequence[np.ndarray], rank: int
) -> Errors:
    """The errors in the gradients that ``rank`` has of ``buckets``, those of ``stream``.

    ``ranges``: for each bucket int64[k, 2], the ranges that hold them. Raises :class:`UsageError` for bits that gradients
    do not have.
    """
    width = min(8 * bucket.grad_data.element_size() for bucket in buckets)
    check_bits(corruption.config, width)
    records = corruption.config.delivery_log is not None
    return Errors(corruption, rank, ranges, width, records, _add_up_of(stream, buckets[0]))


def errors_of_owner(
    corruption: Corruption, stream: Stream, pairs: Sequence[tuple[Any, Any]], shards: int, shard: int, owner: int
) -> Errors:
    """The errors in the gradients that a rank owns with the distributed optimizer.

    It owns shard ``shard`` of ``shards`` of each bucket. ``pairs``: Megatron's (buffer, bucket). ``owner``: the rank in
    the full group, over all optimizer instances. Raises :class:`UsageError` for bits that gradients do not have.
    """
    ranges = []
    for buffer, bucket in pairs:
        size = bucket.grad_data.numel() // shards
        inside = np.clip(used_ranges(buffer, bucket) - shard * size, 0, size)
        ranges.append(inside[inside[:, 0] < inside[:, 1]])
    return errors_in(corruption, stream, [bucket for _, bucket in pairs], ranges, owner)


def _add_up_of(stream: Stream, bucket: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function that adds up over the tensor-parallel ranks of ``stream``; ``None`` if there is one."""
    group = tensor_group(stream.kind == "expert")
    if group is None:
        return None
    peers = RankPeers(group, bucket.grad_data.device)
    return lambda sums: peers.gather(sums[None]).sum(axis=0)
