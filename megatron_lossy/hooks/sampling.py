"""Values of the ranks' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..device import all_gather_single
from ..exchange import units_of
from ..recovery.copies import to_device
from ..transport import LossyGroup
from .buckets import used_ranges


class RankSampler:
    """The parameter buckets of ``group``, whose shards the ranks of ``process_group`` own.

    See :class:`megatron_lossy.monitor.Replicas`. ``pairs``: Megatron's (buffer, bucket) in canonical order.
    """

    def __init__(self, group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]) -> None:
        self.stream = group.stream
        self.workers = group.size
        self.owned = range(group.rank, group.rank + 1)
        self.units = units_of(group.wire.cut["param"])
        self.shards = [bucket.param_data.numel() // group.size for _, bucket in pairs]
        self._process_group = process_group
        self._pairs = pairs

    @property
    def used(self) -> list[np.ndarray]:
        return [used_ranges(buffer, bucket) for buffer, bucket in self._pairs]

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        return self._values(places).double().cpu().numpy()

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        mine = self._values(places)
        values = mine.new_empty(self.workers * mine.numel())
        all_gather_single(values, mine, group=self._process_group)
        return values.double().cpu().numpy().reshape(self.workers, -1)

    def _values(self, places: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[S], which holds every parameter dtype exactly."""
        return torch.cat(
            [
                bucket.param_data[to_device(chosen, bucket.param_data.device)].float()
                for (_, bucket), chosen in zip(self._pairs, places, strict=True)
            ]
        )
