"""Values of all workers' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base.exchange import Stream
from ...hooks.sampling import used_in
from ...run.mechanism import Sending
from ...run.sampling import Sampler
from .versions import Versions


class VirtualSampler(Sampler):
    """The replicas that ``versions`` keeps. ``sending``: knows the owners' weights."""

    def __init__(self, stream: Stream, pairs: Sequence[tuple[Any, Any]], versions: Versions, sending: Sending) -> None:
        workers, _, units = versions.held.shape
        shards = [bucket.param_data.numel() // workers for _, bucket in pairs]
        super().__init__(stream, workers, range(workers), units, shards, sending.weights, used_in(pairs))
        self._versions = versions

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        values = [self._versions.everyone(number, chosen) for number, chosen in enumerate(places)]
        everyone = torch.cat(values, dim=1).double().cpu().numpy()
        owners = np.concatenate([chosen // shard for chosen, shard in zip(places, self.shards, strict=True)])
        everyone[owners, np.arange(len(owners))] = self.own(places)  # which may differ from what it sends
        return everyone
