"""The N replicas of a stream, of which this process holds some: one on a real rank, all of them in one process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist


class Handle:
    """What is under way. :meth:`wait` ends it; a second call does nothing."""

    def __init__(self, end: Callable[[], object] | None = None) -> None:
        self._end = end

    def wait(self) -> None:
        """Return when the result is there; on an accelerator, for what its current stream does next."""
        end, self._end = self._end, None
        if end is not None:
            end()


class Peers(ABC):
    """N replicas. All methods are collective calls of all processes that hold some of them.

    ``size``: N. ``local``: the numbers of the replicas of this process; where a method takes one thing per local replica,
    it is in their order.
    """

    size: int
    local: Sequence[int]

    @abstractmethod
    def gather(self, rows: np.ndarray) -> np.ndarray:
        """[N, k]: the ``rows`` [local, k] of all replicas, int64, uint64 or float64, bit for bit."""

    @abstractmethod
    def sum_(self, tensors: Sequence[torch.Tensor]) -> Handle:
        """Each of ``tensors``, one per local replica, becomes their sum over all replicas, the same bits everywhere.

        Contiguous, of the same length and dtype. In place, asynchronous: neither read nor written before the handle's end.
        """

    @abstractmethod
    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Handle:
        """Each of ``tensors``, one per local replica, becomes that of replica ``source``. As :meth:`sum_`."""


class RankPeers(Peers):
    """One replica on each rank of a process group. ``device``: where its collectives need tensors; others are copied there."""

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> None:
        self.group = group or dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.local = [dist.get_rank(self.group)]
        self._device = torch.device(device)
        self._ranks = dist.get_process_group_ranks(self.group)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        # As integers, which every backend carries as they are.
        words = torch.from_numpy(np.ascontiguousarray(rows[0]).view(np.int64)).to(self._device)
        everyone = [torch.empty_like(words) for _ in range(self.size)]
        dist.all_gather(everyone, words, group=self.group)
        return torch.stack(everyone).cpu().numpy().view(rows.dtype)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> Handle:
        return self._exchange(tensors, partial(dist.all_reduce, group=self.group, async_op=True))

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Handle:
        return self._exchange(
            tensors, partial(dist.broadcast, src=self._ranks[source], group=self.group, async_op=True)
        )

    def _exchange(self, tensors: Sequence[torch.Tensor], begin: Callable[[torch.Tensor], dist.Work]) -> Handle:
        [tensor] = tensors
        if tensor.device.type == self._device.type:
            return Handle(begin(tensor).wait)
        there = tensor.to(self._device)
        work = begin(there)

        def end() -> None:
            work.wait()
            tensor.copy_(there)

        return Handle(end)


class LocalPeers(Peers):
    """N replicas in this process. Sums go from the first to the last; of two they are those of :class:`RankPeers`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = range(size)

    def gather(self, rows: np.ndarray) -> np.ndarray:
        assert len(rows) == self.size
        return rows.copy()

    def sum_(self, tensors: Sequence[torch.Tensor]) -> Handle:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
        return Handle()

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Handle:
        for number, tensor in enumerate(tensors):
            if number != source:
                tensor.copy_(tensors[source])
        return Handle()
