"""The virtual cluster: N workers take turns on one model.

An iteration: each worker's replica is swapped in, and its micro-batches leave a gradient in Megatron's buffer. Units
that will not arrive are removed from it, and the rest is added to a sum. Then each owner's rule corrects its shard of
the sum. The optimizer, which holds all shards, makes one update.

Its twin is :mod:`megatron_lossy.hooks.runtime`, which waits for Megatron to begin exchanges; here nothing is sent, and the
run takes gradients out of Megatron's buffers itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...base.ledger import Patch, Signature, patched
from ...config import LossyConfig
from ...hooks.buckets import bucket_sizes, buckets_by_stream
from ...run.base import ModelChunks
from ...transport import LossyGroup
from .base import VirtualRun
from .sending import VirtualSampler
from .stream import StreamBuckets


class VirtualCluster(VirtualRun):
    """Workers whose replicas are the owners' weights except for stale units: one optimizer, and old versions of shards.

    ``members``: the workers' ranks among ``ranks``; the other ranks are elsewhere. ``writer``: the rank that the
    delivery log names as its writer; default this process's.
    """

    def __init__(
        self,
        config: LossyConfig,
        workers: int,
        steps: int | None = None,
        gapless: bool = False,
        members: range | None = None,
        ranks: int | None = None,
        writer: int | None = None,
    ) -> None:
        super().__init__(config, workers, steps, gapless, writer, ranks)
        self._members, self._ranks = members, ranks
        self._streams: list[StreamBuckets] = []

    def building(self) -> contextlib.AbstractContextManager[None]:
        return buffers_for(self.workers)

    def _add(self, ddp: Any) -> None:
        # Ranks divide by their number before the sum, unless gradients are sums over tokens.
        unit = 1.0 if ddp.config.calculate_per_token_loss else float(self.workers)
        sites = self.config.members(self.workers)
        self._inside = self.workers // sites
        for name, _, pairs in buckets_by_stream(ddp):
            for place in range(self._inside):
                of_place = replace(name, expert_rank=name.expert_rank * self._inside + place)
                stream = StreamBuckets(
                    self.config, pairs, of_place, sites, unit, self.corruption, self.steps, self.living_optimizers,
                    self._members, self._ranks, self._inside, place,
                )  # fmt: skip
                self._streams.append(stream)

    def _norm_by_shards(self) -> contextlib.AbstractContextManager[None]:
        buffers = [bucket.grad_data for stream in self._streams for bucket in stream.buckets]
        norm = Patch(
            target="megatron.core.optimizer.optimizer:get_grad_norm_fp32",
            around=partial(get_grad_norm_fp32, buffers, self.workers, self._inside),
            why="adds up the gradient norm shard by shard, as the ranks do, so that clipping rounds alike",
        )
        return patched("virtual cluster", norm)

    @contextlib.contextmanager
    def _replica(self, worker: int) -> Iterator[None]:
        with contextlib.ExitStack() as turns:
            with torch.no_grad():
                for stream in self._streams:
                    turns.enter_context(stream.turn(worker // self._inside))
            yield

    def _collect_of(self, worker: int) -> None:
        for stream in self._streams:
            stream.collect(worker, self.iteration, self.loss_scale, self.gapless)

    def step(self, optimizer: Any) -> Any:
        result = self.make_update(optimizer)
        self.finish_iteration(bool(result[0]))
        return result

    def make_update(self, optimizer: Any) -> Any:
        """Make the update as :meth:`step` does, without ending the iteration."""
        self.events.iteration_begins()
        if (scale := self._per_token()) is None:
            scale = 1.0 / self.workers
        with torch.no_grad():
            for stream in self._streams:
                stream.reduce(scale)
                stream.versions.before_update(self.iteration, stream.lost(self.iteration))
            self._withdraw()
            self.begin_update()
            with self._norm_by_shards() if self.stages is None else self.stages.updating():
                result = optimizer.step()
            successful = bool(result[0])
            for stream in self._streams:
                if successful:
                    stream.sending.after_update()
                stream.versions.after_update(successful)
            if successful:
                self.update = self.iteration
            self._send()
        self.events.iteration_ends()
        return result

    def begin_update(self) -> None:
        super().begin_update()
        for stream in self._streams:
            stream.sending.before_update()

    def _withdraw(self) -> None:
        for stream in self._streams:
            stream.sending.withdraw()

    def _send(self) -> None:
        """Give receivers the last update as its owners send it."""
        for stream in self._streams if self.update is not None else ():
            stream.sending.send(self.update)

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for stream in self._streams for group in stream.groups]

    @property
    def device(self) -> torch.device:
        return self._streams[0].buckets[0].param_data.device

    @property
    def streams(self) -> list[StreamBuckets]:
        return self._streams

    def replicas(self) -> list[VirtualSampler]:
        return [VirtualSampler(own.groups[0], own.pairs, own.versions, own.sending) for own in self._streams]

    @contextlib.contextmanager
    def exchanged_weights(self, model_chunks: ModelChunks) -> Iterator[None]:
        """See :meth:`Run.exchanged_weights`. Call it outside of a worker's turn."""
        assert self._worker is None
        with torch.no_grad():
            self._withdraw()
        try:
            yield
        finally:
            with torch.no_grad():
                self._send()

    def begin_equal(self) -> None:
        super().begin_equal()
        for stream in self._streams:
            stream.versions.restart()
            stream.sending.restart()

    def load_replicas(self, folder: str | os.PathLike) -> None:
        super().load_replicas(folder)
        with torch.no_grad():
            self._send()

    def identity(self) -> dict[str, Any]:
        return {"workers": self.workers, **bucket_sizes([(stream.stream, stream.pairs) for stream in self._streams])}

    def exchanged_state(self) -> list[Any]:
        return [stream.versions.state_dict() for stream in self._streams]

    def load_exchanged_state(self, state: list[Any]) -> None:
        for stream, versions in zip(self._streams, state, strict=True):
            stream.versions.load_state_dict(versions)


def get_grad_norm_fp32(
    buffers: Sequence[torch.Tensor],
    workers: int,
    inside: int,
    original: Callable,
    grads_for_norm: Any,
    *args: Any,
    **kwargs: Any,
) -> float:
    """Compute the gradient norm as N ranks do: each over its own shard, then the root of the sum of squares.

    Wraps megatron-core's function of that name; gradients are views into ``buffers`` [N * shard].

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
    """Return parts of ``grad``, each with the rank that owns its shard."""
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


class _SizedGroup:
    """A process group of one rank that reports ``size`` ranks."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


def buffers_for(workers: int) -> contextlib.AbstractContextManager[None]:
    """Return a context in which DistributedDataParallel pads its buckets as on ``workers`` ranks.

    Megatron pads each bucket so that it can be cut into as many shards as the group has ranks. So the ends of shards, and
    the units that are lost together, depend on N.
    """

    def padded(original: type) -> type:
        class PaddedBuffer(original):
            def __init__(self, ddp_config, param_dtype, grad_dtype, params, data_parallel_group, *rest, **more):
                sized = _SizedGroup(data_parallel_group, workers)
                super().__init__(ddp_config, param_dtype, grad_dtype, params, sized, *rest, **more)
                self.data_parallel_group = data_parallel_group
                self.data_parallel_world_size = data_parallel_group.size()

        return PaddedBuffer

    def compute_layout(original, params, bucket_size, data_parallel_world_size, *rest, **more):
        layout = original(params, bucket_size, workers, *rest, **more)
        if hasattr(layout, "num_optimizer_shards"):  # from 0.19 on compared with the optimizer's own group
            layout.num_optimizer_shards = data_parallel_world_size
        return layout

    why = "buckets must be padded for as many shards as there are virtual workers"
    return patched(
        "layout of virtual workers",
        Patch(target="megatron.core.distributed.distributed_data_parallel:_ParamAndGradBuffer", make=padded, why=why),
        Patch(
            target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
            around=compute_layout,
            why=why,
            optional=True,
            takes=Signature(("params", "bucket_size", "data_parallel_world_size")),
        ),
    )
