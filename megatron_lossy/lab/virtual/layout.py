"""Buffers with the layout of N real ranks, in a world of one.

Megatron pads each bucket so that it can be cut into as many shards as the group has ranks. So the ends of shards, and
the units that are lost together, depend on N.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from ...base.ledger import Ledger, Patch, Takes


class _Sized:
    """A process group of one rank that reports ``size`` ranks."""

    def __init__(self, group: Any, size: int) -> None:
        self._group = group
        self._size = size

    def size(self) -> int:
        return self._size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)


@contextlib.contextmanager
def buffers_for(workers: int) -> Iterator[None]:
    """A context in which DistributedDataParallel pads its buckets as on ``workers`` ranks."""

    def padded(original: type) -> type:
        class PaddedBuffer(original):
            def __init__(self, ddp_config, param_dtype, grad_dtype, params, data_parallel_group, *rest, **more):
                sized = _Sized(data_parallel_group, workers)
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
    until = "Megatron takes the padding of buckets as an argument"
    ledger = Ledger("layout of virtual workers")
    ledger.install(
        [
            Patch(
                target="megatron.core.distributed.distributed_data_parallel:_ParamAndGradBuffer",
                make=padded,
                why=why,
                versions="before 0.18; later it is given the layout",
                until=until,
            ),
            Patch(
                target="megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._compute_per_buffer_param_layout",
                around=compute_layout,
                why=why,
                versions="0.18 and later",
                until=until,
                optional=True,
                takes=Takes(("params", "bucket_size", "data_parallel_world_size")),
            ),
        ]
    )
    try:
        yield
    finally:
        ledger.uninstall()
