"""Values of all workers' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..exchange import Stream
from ..hooks.buckets import used_ranges
from ..mechanisms.lead.virtual import Leads
from .versions import Versions


class VirtualSampler:
    """See :class:`megatron_lossy.monitor.Replicas`.

    ``pairs``: Megatron's (buffer, bucket) in canonical order.
    """

    def __init__(
        self, stream: Stream, pairs: Sequence[tuple[Any, Any]], versions: Versions, leads: Leads | None
    ) -> None:
        self.stream = stream
        self.workers, _, self.units = versions.held.shape
        self.owned = range(self.workers)
        self.shards = [bucket.param_data.numel() // self.workers for _, bucket in pairs]
        self._pairs = pairs
        self._versions = versions
        self._leads = leads is not None
        self._weights = [bucket.param_data for _, bucket in pairs] if leads is None else leads.weights

    @property
    def used(self) -> list[np.ndarray]:
        return [used_ranges(buffer, bucket) for buffer, bucket in self._pairs]

    def own(self, places: Sequence[np.ndarray]) -> np.ndarray:
        values = [
            weights[torch.from_numpy(chosen).to(weights.device)]
            for weights, chosen in zip(self._weights, places, strict=True)
        ]
        return torch.cat(values).double().cpu().numpy()

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        values = [self._versions.everyone(number, chosen) for number, chosen in enumerate(places)]
        everyone = torch.cat(values, dim=1).double().cpu().numpy()
        if not self._leads:
            return everyone
        owners = np.concatenate([chosen // shard for chosen, shard in zip(places, self.shards, strict=True)])
        everyone[owners, np.arange(len(owners))] = self.own(places)  # without leads
        return everyone
