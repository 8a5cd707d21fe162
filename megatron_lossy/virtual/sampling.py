"""Values of all workers' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..exchange import Stream
from ..hooks.buckets import used_ranges
from ..mechanism import Sending
from .versions import Versions


class VirtualSampler:
    """See :class:`megatron_lossy.monitor.Replicas`.

    ``pairs``: Megatron's (buffer, bucket) in canonical order. ``sending``: knows the owners' weights.
    """

    def __init__(self, stream: Stream, pairs: Sequence[tuple[Any, Any]], versions: Versions, sending: Sending) -> None:
        self.stream = stream
        self.workers, _, self.units = versions.held.shape
        self.owned = range(self.workers)
        self.shards = [bucket.param_data.numel() // self.workers for _, bucket in pairs]
        self._pairs = pairs
        self._versions = versions
        self._weights = sending.weights

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
        owners = np.concatenate([chosen // shard for chosen, shard in zip(places, self.shards, strict=True)])
        everyone[owners, np.arange(len(owners))] = self.own(places)  # which may differ from what it sends
        return everyone
