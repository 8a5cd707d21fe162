"""The full replica of a rank: data parallelism without the distributed optimizer (docs/corruption.md).

Every rank has all of the optimizer. The gradients of a bucket are all-reduced within a coalescing context, which
:mod:`.seam` surrounds. Only :mod:`megatron_lossy.sync` exchanges parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch

from ...channel.corruption import Corruption, Errors, Reduction, check_bits
from ...config import LossyConfig
from ...exchange import Exchange, Stream
from ...hooks.buckets import buckets_by_stream, owned_ranges, used_ranges
from ...hooks.versions import main_gradients, tensor_group
from ...monitor.window import of_all_ranks
from ...peers import RankPeers
from .full_replicas import FullReplicas, Gradients
from .synchroniser import Copies, Replica


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

    @property
    def width(self) -> int:
        """Bits of a gradient's element in the narrowest bucket."""
        return min(8 * bucket.grad_data.element_size() for bucket in self.buckets)

    def errors(self, corruption: Corruption, rank: int, records: bool) -> Errors:
        """The errors in the gradients of ``rank``. Raises :class:`UsageError` for bits that they do not have."""
        check_bits(corruption.config, self.width)
        return Errors(corruption, rank, self.ranges, self.width, records, add_up_of(self.stream, self.buckets[0]))


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


def errors_of_owner(
    config: LossyConfig,
    corruption: Corruption,
    stream: Stream,
    pairs: Sequence[tuple[Any, Any]],
    shards: int,
    shard: int,
    owner: int,
) -> Errors:
    """The errors in the gradients that a rank owns with the distributed optimizer.

    It owns shard ``shard`` of ``shards`` of each bucket. ``owner``: the rank in the full group, over all optimizer
    instances. Raises :class:`UsageError` for bits that gradients do not have.
    """
    ranges = [
        owned_ranges(used_ranges(buffer, bucket), bucket.grad_data.numel() // shards, shard) for buffer, bucket in pairs
    ]
    width = min(8 * bucket.grad_data.element_size() for _, bucket in pairs)
    check_bits(config, width)
    add_up = add_up_of(stream, pairs[0][1])
    return Errors(corruption, owner, ranges, width, config.delivery_log is not None, add_up)


def add_up_of(stream: Stream, bucket: Any) -> Callable[[np.ndarray], np.ndarray] | None:
    """A function that adds up over the tensor-parallel ranks of ``stream``; ``None`` if there is one."""
    group = tensor_group(stream.kind == "expert")
    if group is None:
        return None
    peers = RankPeers(group, bucket.grad_data.device)
    return lambda sums: peers.gather(sums[None]).sum(axis=0)


#: For each of the model's parameters: the float32 tensor that is updated, and torch's optimizer that updates it.
Mains = dict[torch.nn.Parameter, tuple[torch.Tensor, torch.optim.Optimizer]]


def main_parameters(optimizers: Iterable[Any]) -> Mains:
    """The float32 tensors and optimizers of all parameters that are updated."""
    result: Mains = {}
    for one in optimizers:
        if one.optimizer is None:  # a stage without parameters of a kind
            continue
        pairs: list[tuple[Any, Any]] = []
        for model, main in zip(getattr(one, "float16_groups", ()), getattr(one, "fp32_from_float16_groups", ())):
            pairs += zip(model, main, strict=True)
        mains = {id(main) for _, main in pairs}
        for group in one.optimizer.param_groups:
            pairs += [(parameter, parameter) for parameter in group["params"] if id(parameter) not in mains]
        for model, main in pairs:
            result[model] = (main, one.optimizer)
    return result


def moments_of(mains: Sequence[torch.Tensor], states: Sequence[dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Tensors in the optimizer's ``states`` of ``mains``: those with a value for each element, and the others."""
    moments, others = [], []
    for main, state in zip(mains, states, strict=True):
        for name in sorted(state):
            value = state[name]
            if isinstance(value, torch.Tensor):
                (moments if value.numel() == main.numel() and value.is_floating_point() else others).append(value)
    return moments, others


def renew(streams: Iterable[ReplicaStream], names: Collection[str], mains: Mains) -> None:
    """Copy the optimizers' float32 weights into the parameters of the ``streams`` called ``names``.

    Megatron's own copy takes all streams, but main parameters of other streams may hold sums.
    """
    for one in streams:
        for parameter in one.parameters if one.stream.name in names else ():
            if parameter in mains and mains[parameter][0] is not parameter:
                parameter.data.copy_(mains[parameter][0].data)


def total(values: np.ndarray) -> np.ndarray:
    """The sum of float64[k] over all ranks of the world."""
    return of_all_ranks(values).sum(axis=0)


class RankReplica:
    """The replica of this rank. ``optimizers()``: Megatron's, once they exist. ``loss_scale()``: see :class:`Run`."""

    def __init__(
        self,
        config: LossyConfig,
        corruption: Corruption,
        optimizers: Callable[[], list[Any]],
        loss_scale: Callable[[], Any],
    ) -> None:
        self._config = config
        self._corruption = corruption
        self._optimizers = optimizers
        self._loss_scale = loss_scale
        self._streams: list[ReplicaStream] = []
        self._peers: list[RankPeers] = []
        self._errors: list[Errors] = []
        self._places: dict[int, tuple[int, int]] = {}  # of a bucket, by its id: its stream and its number there
        self._squares: dict[tuple[int, int], torch.Tensor] = {}  # of the local gradients of this iteration
        self._together: FullReplicas | None = None

    @property
    def streams(self) -> list[ReplicaStream]:
        """The streams of all model chunks."""
        return self._streams

    def add(self, ddp: Any) -> None:
        """Register the buckets of a model chunk."""
        for one in streams_of(ddp):
            number = len(self._streams)
            peers = RankPeers(one.group, one.buckets[0].grad_data.device)
            rank = peers.local[0] if self._config.grad_error_at == "broadcast" else 0
            self._streams.append(one)
            self._peers.append(peers)
            self._errors.append(one.errors(self._corruption, rank, self._config.delivery_log is not None))
            self._places |= {id(bucket): (number, k) for k, bucket in enumerate(one.buckets)}

    @property
    def together(self) -> FullReplicas:
        """This replica and its peers, once the optimizer exists."""
        if self._together is None:
            mains = main_parameters(self._optimizers())
            gradients = [
                Gradients(one.stream, peers, partial(_read, one))
                for one, peers in zip(self._streams, self._peers, strict=True)
            ]
            copies = [
                Copies(one.stream.name, peers, [_replica(one, mains)])
                for one, peers in zip(self._streams, self._peers, strict=True)
            ]
            aside = [model for model, (main, _) in mains.items() if model is not main]
            self._together = FullReplicas(
                self._config, gradients, copies, total, lambda names: renew(self._streams, names, mains),
                [lambda: [p.data for p in aside]],
            )  # fmt: skip
        return self._together

    # --- an iteration ----------------------------------------------------------------------------------------------

    def before_reduction(self, bucket_group: Any) -> None:
        """Note the squared norms of the gradients of ``bucket_group`` before their all-reduce, if they are needed.

        Megatron has scaled the gradients; the norms are free of the scale.
        """
        if self._together is None or not self._together.wants_gradient:
            return
        for bucket in bucket_group.buckets:
            local = bucket.grad_data / (bucket.gradient_scaling_factor * self._unit())
            self._squares[self._places[id(bucket)]] = torch.linalg.vector_norm(local, dtype=torch.float32) ** 2

    def after_reduction(self, bucket_group: Any, step: int) -> None:
        """Let errors hit the gradients of ``bucket_group`` after their all-reduce."""
        with torch.no_grad():
            for bucket in bucket_group.buckets:
                number, k = self._places[id(bucket)]
                if self._peers[number].size == 1:
                    continue  # nothing is sent
                exchange = Exchange("grad", self._streams[number].stream, step)
                self._errors[number].hit(exchange, k, bucket.grad_data, self._unit)

    def _unit(self) -> float:
        scale = self._loss_scale()
        return 1.0 if scale is None else float(scale)

    def arrive(self) -> None:
        """The update is about to be made."""
        self.together.arrive(self._gradient())

    def finished(self) -> None:
        """The update has been made."""
        self.together.finished(self._gradient())
        self._squares.clear()

    def _gradient(self) -> list[list[float]] | None:
        if not self.together.wants_gradient:
            return None
        sums = [0.0 for _ in self._streams]
        for (number, _), square in self._squares.items():
            sums[number] += float(square)
        return [[one] for one, peers in zip(sums, self._peers, strict=True) if peers.size > 1]

    def take(self, step: int) -> list[Any]:
        """Events of ``step``: :class:`Reduction`, :class:`Mismatch`, :class:`Synced`."""
        everywhere = self._config.grad_error_at == "reduce"  # all replicas have the same, and the first one reports it
        reductions: list[Reduction] = [
            one
            for errors, peers in zip(self._errors, self._peers, strict=True)
            for one in errors.take(step)
            if not everywhere or peers.local[0] == 0
        ]
        return [*reductions, *self.together.take()]


def _read(one: ReplicaStream) -> list[list[list[torch.Tensor]]]:
    """The tensors that the optimizer reads of each bucket: from megatron-core 0.17 on not only the buffer.

    Parameters whose micro-batches are added up in float32 have a gradient of their own. Megatron copies the reduced
    gradient into it, and adds up the gradients of tied embeddings there.
    """
    return [[[bucket.grad_data, *main_gradients(bucket)] for bucket in one.buckets]]


def _replica(one: ReplicaStream, mains: Mains) -> Replica:
    own = [mains[parameter] for parameter in one.parameters if parameter in mains]
    tensors = [main for main, _ in own]

    def states() -> Iterator[dict[str, Any]]:
        return (inner.state.get(main, {}) for main, inner in own)  # loading replaces them

    return Replica(
        parameters=lambda: [main.data for main in tensors],
        moments=lambda: moments_of(tensors, list(states()))[0],
        others=lambda: moments_of(tensors, list(states()))[1],
        aside=all(mains[parameter][0] is not parameter for parameter in one.parameters if parameter in mains),
    )
