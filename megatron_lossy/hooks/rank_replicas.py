"""What the drift monitor sees of a real rank: its replica of the buckets of one stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..transport import LossyGroup


class RankReplicas:
    """The parameter buckets of ``group``, whose shards the ranks of ``process_group`` own.

    See :class:`megatron_lossy.monitor.drift.Replicas`. ``pairs``: Megatron's (buffer, bucket) in canonical order.
    """

    def __init__(
        self, group: LossyGroup, process_group: dist.ProcessGroup, pairs: Sequence[tuple[Any, Any]]
    ) -> None:
        self.stream = group.stream
        self.workers = group.size
        self.owned = range(group.rank, group.rank + 1)
        self.units = group.deliveries["param"].units
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
        dist.all_gather_into_tensor(values, mine, group=self._process_group)
        return values.double().cpu().numpy().reshape(self.workers, -1)

    def _values(self, places: Sequence[np.ndarray]) -> torch.Tensor:
        """float32[S], which holds every parameter dtype exactly."""
        return torch.cat(
            [
                bucket.param_data[torch.from_numpy(chosen).to(bucket.param_data.device)].float()
                for (_, bucket), chosen in zip(self._pairs, places, strict=True)
            ]
        )


def used_ranges(buffer: Any, bucket: Any) -> np.ndarray:
    """int64[k, 2]: where parameters are in ``bucket`` of Megatron's ``buffer``; the rest is padding."""
    ranges = [buffer.param_index_map[parameter][:2] for parameter in bucket.params_list]
    return np.array(sorted(ranges), dtype=np.int64).reshape(-1, 2) - bucket.offset
