"""Which units of a bucket are lost, and where they are."""

from __future__ import annotations

import numpy as np


class Lost:
    """``mask`` bool[shards, count]: the units that are lost. Their places are worked out once, when asked for."""

    def __init__(self, mask: np.ndarray) -> None:
        self.mask = mask
        self._places: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def places(self, numbers: slice) -> tuple[np.ndarray, np.ndarray]:
        """int32[k] and int32[k]: the shard, and the unit counted from ``numbers.start``, of each one in ``numbers``."""
        key = (numbers.start, numbers.stop)
        if key not in self._places:
            shards, units = np.nonzero(self.mask[:, numbers])
            self._places[key] = (shards.astype(np.int32), units.astype(np.int32))
        return self._places[key]

    def equals(self, other: Lost) -> bool:
        """Whether the same units are lost."""
        return np.array_equal(self.mask, other.mask)
