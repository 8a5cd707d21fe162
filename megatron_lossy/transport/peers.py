"""The N replicas of a stream. A process holds some of them: one on a real rank, or all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist

from ..base.fetch import PendingArray, aside
from ..recovery.rows import to_device, used_here
from .base import Transfer


class Peers(ABC):
    """N replicas. All methods are collective calls of all processes that hold some of them.

    ``size``: N. ``local``: the numbers of the replicas of this process. An argument with one item per local replica has
    this order.
    """

    size: int
    local: Sequence[int]

    @abstractmethod
    def gather(self, rows: np.ndarray | torch.Tensor) -> np.ndarray:
        """Return [N, k]: the ``rows`` [local, k] of all replicas, int64, uint64 or float64, bit for bit.

        A tensor, int64, may be on a device. Then the host waits once, for the result.
        """

    @abstractmethod
    def sum_(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        """Replace each of ``tensors``, one per local replica, by their sum over all replicas, the same bits everywhere.

        Tensors are contiguous, of the same length and dtype. The sum is in place and asynchronous: neither read nor
        write them before the wait; on an accelerator its current stream may use them then.
        """

    @abstractmethod
    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Transfer:
        """Replace each of ``tensors``, one per local replica, by that of replica ``source``; else as :meth:`sum_`."""


class RankPeers(Peers):
    """One replica on each rank of a process group.

    ``device``: the device that its collectives need. Tensors elsewhere are copied there.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device | str = "cpu") -> None:
        self.group = group or dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.local = [dist.get_rank(self.group)]
        self._device = torch.device(device)
        self._ranks = dist.get_process_group_ranks(self.group)

    def gather(self, rows: np.ndarray | torch.Tensor) -> np.ndarray:
        # Rows travel as integers: every backend carries these unchanged.
        if isinstance(rows, torch.Tensor):
            words, dtype = rows[0].to(self._device), np.dtype(np.int64)
        else:
            words, dtype = to_device(np.ascontiguousarray(rows[0]).view(np.int64), self._device), rows.dtype
        everyone = [torch.empty_like(words) for _ in range(self.size)]
        dist.all_gather(everyone, words, group=self.group)
        return PendingArray(torch.stack(everyone)).wait().view(dtype)

    def sum_(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        return self._exchange(tensors, partial(dist.all_reduce, group=self.group, async_op=True))

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Transfer:
        return self._exchange(
            tensors, partial(dist.broadcast, src=self._ranks[source], group=self.group, async_op=True)
        )

    def _exchange(self, tensors: Sequence[torch.Tensor], begin: Callable[[torch.Tensor], dist.Work]) -> Transfer:
        [tensor] = tensors
        if tensor.device.type == self._device.type:
            return Transfer(begin(tensor))
        if self._device.type == "cuda":
            return Transfer(None, self._beside(tensor, begin))
        there = tensor.to(self._device)
        return Transfer(begin(there), partial(tensor.copy_, there))

    def _beside(self, tensor: torch.Tensor, begin: Callable[[torch.Tensor], dist.Work]) -> Callable[[], object]:
        """Let ``begin`` exchange ``tensor``, in host memory, on the CUDA device. Return a function that waits."""
        there = to_device(tensor, self._device)
        work = begin(there)
        with aside(self._device):  # so that what is computed does not wait for the others
            work.wait()
            used_here((there,))
            back = PendingArray(bytes_of(there))

        def end() -> None:
            bytes_of(tensor).copy_(torch.from_numpy(back.wait()))

        return end


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8[n] of a contiguous ``tensor``, in its memory."""
    return tensor.view(-1).view(torch.uint8)


class LocalPeers(Peers):
    """N replicas in this process. Sums go from the first to the last; of two they equal those of :class:`RankPeers`."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.local = range(size)

    def gather(self, rows: np.ndarray | torch.Tensor) -> np.ndarray:
        assert len(rows) == self.size
        return (PendingArray(rows).wait() if isinstance(rows, torch.Tensor) else rows).copy()

    def sum_(self, tensors: Sequence[torch.Tensor]) -> Transfer:
        total = tensors[0].clone()
        for tensor in tensors[1:]:
            total += tensor
        for tensor in tensors:
            tensor.copy_(total)
        return Transfer(None)

    def broadcast_(self, tensors: Sequence[torch.Tensor], source: int) -> Transfer:
        for number, tensor in enumerate(tensors):
            if number != source:
                tensor.copy_(tensors[source])
        return Transfer(None)
