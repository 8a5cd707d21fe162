"""Values of replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..device import all_gather_single
from ..exchange import Stream, units_of
from ..recovery.copies import to_device
from ..transport import LossyGroup
from .buckets import used_ranges


class Sampler(ABC):
    """Samples replicas of the buckets of ``stream``; see :class:`megatron_lossy.monitor.Replicas`.

    ``pairs``: Megatron's (buffer, bucket) in canonical order. ``weights``: of each bucket, the owner's where this process
    owns a place.
    """

    def __init__(
        self,
        stream: Stream,
        workers: int,
        owned: range,
        units: int,
        pairs: Sequence[tuple[Any, Any]],
        weights: Sequence[torch.Tensor],
    ) -> None:
        self.stream = stream
        self.workers = workers
        self.owned = owned
        self.units = units
        self.shards = [bucket.param_data.numel() // workers for _, bucket in pairs]
        self._pairs = pairs
        self._weights = weights

    @property
    def used(self) -> list[np.ndarray]:
        return [used_ranges(buffer, bucket) for buffer, bucket in self._pairs]

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        return self._values(places).double().cpu().numpy()

    def _values(self, places: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[S], which holds every parameter dtype exactly."""
        found = zip(self._weights, places, strict=True)
        return torch.cat([weights[to_device(chosen, weights.device)].float() for weights, chosen in found])

    @abstractmethod
    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        """See :meth:`megatron_lossy.monitor.Replicas.everyone`."""


class RankSampler(Sampler):
    """The parameter buckets of ``group``, whose shards the ranks of ``process_group`` own."""

    def __init__(self, group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]) -> None:
        owned, units = range(group.rank, group.rank + 1), units_of(group.wire.cut["param"])
        super().__init__(group.stream, group.size, owned, units, pairs, [bucket.param_data for _, bucket in pairs])
        self._process_group = process_group

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        mine = self._values(places)
        values = mine.new_empty(self.workers * mine.numel())
        all_gather_single(values, mine, group=self._process_group)
        return values.double().cpu().numpy().reshape(self.workers, -1)
