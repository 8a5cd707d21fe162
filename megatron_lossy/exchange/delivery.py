"""What an exchange returns: which units arrived. A channel draws it, a real network reports it; nobody else can tell.

One record for all: recovery rules, monitors, the delivery log and checkpoints are handed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .exchange import Exchange
from .units import BucketUnits


@dataclass(frozen=True)
class Delivery:
    """What arrived in one exchange at some of its ranks: at one on a real rank, at all in a virtual cluster.

    ``sources`` [S] and ``receivers`` [R] are ranks in the full group. ``arrived`` bool[R, S, units] includes each
    rank's own shard. ``cut`` says for every bucket how its units are numbered and how many elements each has; with
    ``--loss-unit shard`` all buckets share unit 0. ``sent`` bool[S, units] says for one receiver what of its own data
    arrived at each of the others, where that is known: gradients only. In phase ``param`` what did not arrive is
    stale from now on.
    """

    exchange: Exchange
    sources: Sequence[int]
    receivers: Sequence[int]
    arrived: np.ndarray
    cut: Sequence[BucketUnits]
    sent: np.ndarray | None = None

    def incoming(self, units: BucketUnits) -> np.ndarray:
        """bool[S, count]: what of the bucket that is cut into ``units`` arrived at the one receiver, by source."""
        assert len(self.arrived) == 1
        return self.arrived[0][:, units.numbers]

    def outgoing(self, units: BucketUnits) -> np.ndarray:
        """bool[S, count]: what of the one receiver's bucket arrived, by destination."""
        assert self.sent is not None
        return self.sent[:, units.numbers]
