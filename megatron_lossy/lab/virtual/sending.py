"""The values that the owners of a stream of virtual workers send."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from ...transport import LossyGroup
from ...transport.group import columns


def seen(group: LossyGroup, buffer: torch.Tensor) -> torch.Tensor:
    """The shards of ``buffer`` that the N members of ``group`` exchange, in it: all of it, or [N, shard] that are apart."""
    return buffer if group.ranks == 1 else columns(buffer, group.size, group.ranks, group.place)


class Sending:
    """The values that the owners of a stream of virtual workers send: their weights, unless a mechanism sends others.

    Between updates the parameter ``buffers``, [N * shard] or [N, shard] for every bucket, hold the values that were sent. If these are
    not the owners' weights (:attr:`changes`), the weights are kept beside them.
    """

    #: Whether :meth:`change` does anything.
    changes: bool = False

    def __init__(self, buffers: Sequence[torch.Tensor], workers: int) -> None:
        self.buffers = buffers
        self._workers = workers
        self._kept: list[torch.Tensor] | None = None

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """The owners' weights of every bucket."""
        return self.buffers if self._kept is None else self._kept

    @property
    def kept(self) -> int:
        """Elements held beside the buffers."""
        return 0 if self._kept is None else sum(weights.numel() for weights in self._kept)

    @contextlib.contextmanager
    def owner(self, worker: int) -> Iterator[None]:
        """A context in which the shards of ``worker`` hold its weights."""
        if self._kept is None:
            yield
            return
        shards = [buffer.chunk(self._workers)[worker] for buffer in self.buffers]
        sent = [shard.clone() for shard in shards]
        for shard, weights in zip(shards, self._kept, strict=True):
            shard.copy_(weights.chunk(self._workers)[worker])
        try:
            yield
        finally:
            for shard, value in zip(shards, sent, strict=True):
                shard.copy_(value)

    def withdraw(self) -> None:
        """Put the owners' weights into the buffers."""
        if self._kept is not None:
            for buffer, weights in zip(self.buffers, self._kept, strict=True):
                buffer.copy_(weights)
            self._kept = None

    def before_update(self) -> None:
        """The owners' weights, which are in the buffers, are about to be updated."""

    def after_update(self) -> None:
        """The owners' weights have been updated."""

    def send(self, step: int) -> None:
        """Put what owners send after the update of ``step`` into the buffers. It may be called again for ``step``."""
        if self.changes:
            self._kept = [buffer.clone() for buffer in self.buffers]
            self.change(step)

    def change(self, step: int) -> None:
        """Turn the owners' weights in the buffers, those of the update of ``step``, into what they send."""

    def restart(self) -> None:
        """Begin again with the owners' weights of a checkpoint in the buffers."""
        self._kept = None
