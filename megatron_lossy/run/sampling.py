"""Values of replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..base.device import all_gather_single
from ..base.exchange import Stream
from ..recovery.copies import to_device
from ..transport import LossyGroup

#: Finds int64[k, 2] for each bucket: the places that hold parameters.
Used = Callable[[], list[np.ndarray]]


class Sampler(ABC):
    """Samples replicas of the buckets of ``stream``; see :class:`megatron_lossy.run.monitor.Replicas`.

    ``shards``: elements of a shard of each bucket. ``weights``: of each bucket, the owner's where this process owns a
    place.
    """

    def __init__(
        self,
        stream: Stream,
        workers: int,
        owned: range,
        units: int,
        shards: Sequence[int],
        weights: Sequence[torch.Tensor],
        used: Used,
    ) -> None:
        self.stream = stream
        self.workers = workers
        self.owned = owned
        self.units = units
        self.shards = shards
        self._weights = weights
        self._used = used

    @property
    def used(self) -> list[np.ndarray]:
        return self._used()

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        return self._values(places).double().cpu().numpy()

    def _values(self, places: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[S], which holds every parameter dtype exactly."""
        found = zip(self._weights, places, strict=True)
        return torch.cat([weights[to_device(chosen, weights.device)].float() for weights, chosen in found])

    @abstractmethod
    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """See :meth:`megatron_lossy.run.monitor.Replicas.everyone`."""


class RankSampler(Sampler):
    """The parameter buckets of ``group``, whose shards the ranks of ``process_group`` own.

    ``replicas``: this rank's, [N * shard] of each bucket.
    """

    def __init__(
        self, group: LossyGroup, process_group: dist.ProcessGroup, replicas: Sequence[torch.Tensor], used: Used
    ) -> None:
        owned, units = range(group.rank, group.rank + 1), group.wire.count["param"]
        shards = [replica.numel() // group.size for replica in replicas]
        super().__init__(group.stream, group.size, owned, units, shards, replicas, used)
        self._process_group = process_group

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        mine = self._values(places)
        values = mine.new_empty(self.workers * mine.numel())
        all_gather_single(values, mine, group=self._process_group)
        return values.double().cpu().numpy().reshape(self.workers, -1)
