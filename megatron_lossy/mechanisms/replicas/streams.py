"""The streams of Megatron's buckets that full replicas reduce; their float32 weights and moments in Megatron's optimizers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ...base.exchange import Stream
from ...hooks.buckets import buckets_by_stream, used_ranges

#: A float32 tensor that is updated, and torch's optimizer that updates it.
Main = tuple[torch.Tensor, torch.optim.Optimizer]
#: That of each of the model's parameters.
Mains = dict[torch.nn.Parameter, Main]


def main_parameters(optimizers: Iterable[Any]) -> Mains:
    """Return the float32 tensors and optimizers of all parameters that are updated."""
    result: Mains = {}
    for optimizer in optimizers:
        if optimizer.optimizer is None:  # a stage without parameters of a kind
            continue
        pairs: list[tuple[Any, Any]] = []
        copied = getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ())
        for model, main in zip(*copied):
            pairs += zip(model, main, strict=True)
        mains = {id(main) for _, main in pairs}
        for group in optimizer.optimizer.param_groups:
            pairs += [(parameter, parameter) for parameter in group["params"] if id(parameter) not in mains]
        for model, main in pairs:
            result[model] = (main, optimizer.optimizer)
    return result


def moments_of(mains: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return tensors in the optimizer's ``states`` of ``mains``: those with a value an element, and the others."""
    moments, others = [], []
    for main, state in zip(mains, states, strict=True):
        for name in sorted(state):
            value = state[name]
            if isinstance(value, torch.Tensor):
                (moments if value.numel() == main.numel() and value.is_floating_point() else others).append(value)
    return moments, others


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
    """Return the streams of a model chunk. A tied embedding shares its bucket, so its stream gets the chunk's stage."""
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
    for stream in streams:
        for parameter in stream.parameters if stream.stream.name in names else ():
            if parameter in mains and mains[parameter][0] is not parameter:
                parameter.data.copy_(mains[parameter][0].data)
