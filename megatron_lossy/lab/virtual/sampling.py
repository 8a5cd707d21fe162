"""Values of all workers' replicas of the buckets of one stream, for monitors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...hooks.sampling import used_in
from ...run.sampling import Sampler
from ...transport import LossyGroup
from .sending import Sending
from .versions import Versions


class VirtualSampler(Sampler):
    """The replicas that ``versions`` keeps. ``group``: that of a worker. ``sending``: knows the owners' weights."""

    def __init__(
        self, group: LossyGroup, pairs: Sequence[tuple[Any, Any]], versions: Versions, sending: Sending
    ) -> None:
        workers, _, units = versions.held.shape
        shards = [bucket.param_data.numel() // group.shards for _, bucket in pairs]
        weights = [buffer.reshape(-1) for buffer in sending.weights]
        super().__init__(group.stream, workers, range(workers), units, shards, weights, used_in(pairs, group))
        self._versions = versions

    def everyone(self, places: Sequence[np.ndarray]) -> np.ndarray:
        values = [self._versions.everyone(number, chosen) for number, chosen in enumerate(places)]
        everyone = torch.cat(values, dim=1).double().cpu().numpy()
        owners = np.concatenate([chosen // shard for chosen, shard in zip(places, self.shards, strict=True)])
        everyone[owners, np.arange(len(owners))] = self.own(places)  # which may differ from what it sends
        return everyone
