"""What came of an exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .exchange import Exchange
from .units import BucketUnits


@dataclass(frozen=True)
class Observation:
    """What arrived in one exchange at some of its ranks: at one on a real rank, at all in a virtual cluster.

    ``sources`` [S] and ``receivers`` [R] are ranks in the full group; ``arrived`` bool[R, S, units] includes each
    rank's own shard. ``buckets`` says how the units are numbered and how many elements each has; with
    ``--loss-unit shard`` all buckets share unit 0. In phase ``param`` what did not arrive is stale from now on.
    """

    exchange: Exchange
    sources: Sequence[int]
    receivers: Sequence[int]
    arrived: np.ndarray
    buckets: Sequence[BucketUnits]
