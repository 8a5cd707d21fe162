"""Megatron's buckets: their streams, the places of parameters in them, their main weights (the optimizer's, in float32,
whose copies in the buffers that are sent may have 16 bits), and the errors that hit their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..base.errors import UsageError
from ..base.exchange import BucketUnits, Stream
from ..channel.corruption import Corruption
from ..channel.corruption.applied import Errors
from ..transport.group import inside
from ..transport.peers import RankPeers
from .versions import dense_buffers, expert_rank, full_group, model_chunk, pipeline_stage, tensor_group

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel
    from torch.distributed import ProcessGroup

    from ..transport import LossyGroup


def buckets_by_stream(ddp: DistributedDataParallel) -> list[tuple[Stream, Any, list[tuple[Any, Any]]]]:
    """Return the streams of a model chunk, each with its full group and (buffer, bucket) pairs in canonical order."""
    result = []
    stage, chunk = pipeline_stage(ddp), model_chunk(ddp)
    for buffers, full, kind, expert in (
        (dense_buffers(ddp), full_group(ddp, expert=False), "dense", 0),
        (ddp.expert_parallel_buffers, full_group(ddp, expert=True), "expert", expert_rank(ddp)),
    ):
        buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        tied = [pair for pair in buckets if _is_shared_embedding(pair[1])]
        rest = [pair for pair in buckets if not _is_shared_embedding(pair[1])]
        for chosen, stream in ((rest, Stream(kind, expert, stage, chunk)), (tied, Stream("embedding"))):
            if chosen:
                result.append((stream, full, chosen))
    return result


def bucket_sizes(streams: Sequence[tuple[Stream, Sequence[tuple[Any, Any]]]]) -> dict[str, str]:
    """Return size and dtypes of every bucket in words, by its name. ``streams``: each with (buffer, bucket) pairs."""
    found = {}
    for stream, pairs in streams:
        for number, (_, bucket) in enumerate(pairs):
            grad, param = bucket.grad_data, bucket.param_data
            dtype = (bucket.params_list[0] if param is None else param).dtype  # it is None if all have all weights
            found[f"bucket {number} of {stream.name}"] = f"{grad.numel()} elements ({grad.dtype}, {dtype})"
    return found


def apart(stream: Stream, stage: int, tensor: ProcessGroup | None) -> Stream:
    """Return ``stream`` with its stage and tensor-parallel rank, because a network loses other units of each copy."""
    return replace(stream, stage=stage, tensor=None if tensor is None else tensor.rank())


def replicated_units(buffer: Any, bucket: Any, units: BucketUnits, shards: int) -> np.ndarray:
    """Return bool[N, count], by shard: units of ``bucket`` with parameters that all tensor-parallel ranks have."""
    result = np.zeros((shards, units.count), dtype=bool)
    for parameter in bucket.params_list:
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        start, end = (place - bucket.offset for place in buffer.param_index_map[parameter][:2])
        for shard in range(start // units.shard, (end - 1) // units.shard + 1):
            first = max(start - shard * units.shard, 0) // units.elements
            last = (min(end - shard * units.shard, units.shard) - 1) // units.elements
            result[shard, first : last + 1] = True
    return result


def _is_shared_embedding(bucket: Any) -> bool:
    return any(getattr(param, "shared_embedding", False) for param in bucket.params_list)


def used_ranges(buffer: Any, bucket: Any) -> np.ndarray:
    """Return int64[k, 2]: the ranges of ``bucket`` of Megatron's ``buffer`` with parameters; the rest is padding."""
    ranges = [buffer.param_index_map[parameter][:2] for parameter in bucket.params_list]
    return np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2) - bucket.offset


def used_in(pairs: Sequence[tuple[Any, Any]], group: LossyGroup) -> list[np.ndarray]:
    """Return the places of parameters in ``pairs`` of Megatron's (buffer, bucket), as ``group`` exchanges them."""
    shards = [bucket.param_data.numel() // group.shards for _, bucket in pairs]
    return [group.seen(used_ranges(*pair), shard) for pair, shard in zip(pairs, shards, strict=True)]


def own_shard(bucket: Any, rank: int, size: int) -> torch.Tensor:
    """Return [shard]: the part of the parameters of ``bucket`` that ``rank`` of its group of ``size`` owns."""
    return bucket.param_data.chunk(size)[rank]


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


# --- errors in their gradients ---------------------------------------------------------------------------------------


def errors_in(
    corruption: Corruption, stream: Stream, buckets: Sequence[Any], ranges: Sequence[np.ndarray], rank: int
) -> Errors:
    """Return the errors in the gradients that ``rank`` has of ``buckets``, those of ``stream``.

    ``ranges``: for each bucket int64[k, 2], the ranges that hold them. Raise as :class:`.Errors`.
    """
    width, group = min(8 * bucket.grad_data.element_size() for bucket in buckets), tensor_group(stream.kind == "expert")
    if group is None:
        return Errors(corruption, rank, ranges, width)
    peers = RankPeers(group, buckets[0].grad_data.device)  # they have the other parts of each gradient
    return Errors(corruption, rank, ranges, width, lambda sums: peers.gather(sums[None]).sum(axis=0))


def errors_of_owner(
    corruption: Corruption, stream: Stream, pairs: Sequence[tuple[Any, Any]], shards: int, shard: int, owner: int
) -> Errors:
    """Return the errors in the gradients that a rank owns with the distributed optimizer.

    It owns shard ``shard`` of ``shards`` of each bucket. ``pairs``: Megatron's (buffer, bucket). ``owner``: the rank in
    the full group, over all optimizer instances. Raise as :class:`.Errors`.
    """
    ranges = [inside(used_ranges(*pair), shard, pair[1].grad_data.numel() // shards) for pair in pairs]
    return errors_in(corruption, stream, [bucket for _, bucket in pairs], ranges, owner)
