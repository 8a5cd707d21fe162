"""The values that owners of a virtual cluster send with a lead (``--param-send compensated``).

Between updates the parameter buffers hold the sent values, V, so that :class:`Versions` keeps the values that receivers
have. The owners' weights, W, are kept beside them. They are put back for an owner in its own shard, the optimizer,
evaluation with the owners' weights, and a checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ...transport import LossyGroup


class Leads:
    """The leads of all buckets of a stream.

    ``groups``: one for every worker. ``buffers``: one for every bucket, [N * shard]. ``main``: returns a bucket's
    weights in float32, as the optimizer has them. ``weights``: W of every bucket; these are ``buffers`` themselves
    while no lead is on them.
    """

    def __init__(
        self,
        groups: Sequence[LossyGroup],
        buffers: Sequence[torch.Tensor],
        main: Callable[[int], torch.Tensor],
    ) -> None:
        self._groups, self._buffers, self._main = groups, buffers, main
        self._whole: dict[int, torch.Tensor] = {}
        self._kept: list[torch.Tensor] | None = None
        for worker, group in enumerate(groups):
            for bucket, rule in enumerate(group.params):
                rule.weights = partial(self._shard, worker, bucket)

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        return self._buffers if self._kept is None else self._kept

    @property
    def kept(self) -> int:
        """Elements held beside the buffers."""
        return 0 if self._kept is None else sum(weights.numel() for weights in self._kept)

    def _shard(self, worker: int, bucket: int) -> torch.Tensor:
        return self._whole[bucket].chunk(len(self._groups))[worker]

    @contextlib.contextmanager
    def _optimizers_weights(self) -> Iterator[None]:
        self._whole = {bucket: self._main(bucket) for bucket in range(len(self._buffers))}
        try:
            yield
        finally:
            self._whole = {}

    def withdraw(self) -> None:
        """Put the owners' weights into the buffers."""
        if self._kept is not None:
            for buffer, weights in zip(self._buffers, self._kept, strict=True):
                buffer.copy_(weights)
            self._kept = None

    def before_update(self) -> None:
        """Call this before the update of the owners' weights."""
        with self._optimizers_weights():
            for worker, group in enumerate(self._groups):
                group.before_update([buffer.chunk(len(self._groups))[worker] for buffer in self._buffers])

    def send(self, step: int) -> None:
        """Add the leads of ``step`` to the owners' weights in the buffers."""
        self._kept = [buffer.clone() for buffer in self._buffers]
        with self._optimizers_weights():
            for worker, group in enumerate(self._groups):
                lead = group.lead(step)
                for rule, buffer in zip(group.params, self._buffers, strict=True):
                    rule.put_lead(step, buffer.chunk(len(self._groups))[worker], lead)

    @contextlib.contextmanager
    def owner(self, worker: int) -> Iterator[None]:
        """A context in which the shards of ``worker`` hold its weights."""
        if self._kept is None:
            yield
            return
        shards = [buffer.chunk(len(self._groups))[worker] for buffer in self._buffers]
        sent: list[Any] = [shard.clone() for shard in shards]
        for shard, weights in zip(shards, self._kept, strict=True):
            shard.copy_(weights.chunk(len(self._groups))[worker])
        try:
            yield
        finally:
            for shard, value in zip(shards, sent, strict=True):
                shard.copy_(value)

    def restart(self) -> None:
        """Begin again with the owners' weights of a checkpoint in the buffers."""
        self._kept = None
