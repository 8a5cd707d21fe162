"""The streams of Megatron's buckets that full replicas reduce."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...base.exchange import Stream
from ...hooks.buckets import buckets_by_stream, used_ranges
from .optimizers import Mains


@dataclass
class ReplicaStream:
    """One stream of a model chunk: its (buffer, bucket) ``pairs``, and the ``parameters`` in them."""

    stream: Stream
    group: Any
    pairs: list[tuple[Any, Any]]
    parameters: list[torch.nn.Parameter]

    @property
    def buckets(self) -> list[Any]:
        """The buckets in canonical order."""
        return [bucket for _, bucket in self.pairs]

    @property
    def ranges(self) -> list[np.ndarray]:
        """int64[k, 2] for each bucket: the ranges that hold parameters."""
        return [used_ranges(buffer, bucket) for buffer, bucket in self.pairs]


def streams_of(ddp: Any) -> list[ReplicaStream]:
    """The streams of a model chunk. A tied embedding shares its bucket, so its stream gets the chunk's stage."""
    result = []
    for stream, full, pairs in buckets_by_stream(ddp):
        if stream.kind == "embedding":
            dense = next(iter(buckets_by_stream(ddp)))[0]
            stream = replace(stream, stage=dense.stage, chunk=dense.chunk)
        parameters = [parameter for _, bucket in pairs for parameter in bucket.params_list]
        result.append(ReplicaStream(stream, full, pairs, parameters))
    return result


def renew(streams: Iterable[ReplicaStream], names: Collection[str], mains: Mains) -> None:
    """Copy the optimizers' float32 weights into the parameters of the ``streams`` called ``names``.

    Megatron's own copy takes all streams, but main parameters of other streams may hold sums.
    """
    for one in streams:
        for parameter in one.parameters if one.stream.name in names else ():
            if parameter in mains and mains[parameter][0] is not parameter:
                parameter.data.copy_(mains[parameter][0].data)
