"""Values of the ranks' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist

from ..device import all_gather_single
from ..exchange import units_of
from ..recovery.copies import to_device
from ..transport import LossyGroup


class RankSampler:
    """The replicas of the buckets of ``group``, whose shards the ranks of ``process_group`` own.

    See :class:`megatron_lossy.monitor.Replicas`. ``replicas``: this rank's, [N * shard] of each bucket. ``used``: finds
    the places of their parameters.
    """

    def __init__(
        self,
        group: LossyGroup,
        process_group: dist.ProcessGroup,
        replicas: Sequence[torch.Tensor],
        used: Callable[[], list[np.ndarray]],
    ) -> None:
        self.stream = group.stream
        self.workers = group.size
        self.owned = range(group.rank, group.rank + 1)
        self.units = units_of(group.wire.cut["param"])
        self.shards = [replica.numel() // group.size for replica in replicas]
        self._process_group = process_group
        self._replicas = replicas
        self._used = used

    @property
    def used(self) -> list[np.ndarray]:
        return self._used()

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
                replica[to_device(chosen, replica.device)].float()
                for replica, chosen in zip(self._replicas, places, strict=True)
            ]
        )
