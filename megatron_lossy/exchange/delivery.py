"""What an exchange returns: which units arrived. A channel draws it, a real network reports it; nobody else can tell.

One record for all: recovery rules, monitors, the delivery log and checkpoints are handed it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .exchange import Exchange
from .lost import Lost
from .units import BucketUnits


@dataclass(frozen=True)
class Delivery:
    """What arrived in one exchange at some of its ranks: at one on a real rank, at all in a virtual cluster.

    ``sources`` [S] and ``receivers`` [R] are ranks in the full group. ``arrived`` bool[R, S, units] includes each
    rank's own shard. ``cut`` says for every bucket how its units are numbered and how many elements each has; with
    ``--loss-unit shard`` all buckets share unit 0. ``sent`` bool[S, units] says for one receiver what of its own data
    arrived at each of the others, where that is known: gradients only. In phase ``param`` what did not arrive is
    stale from now on. ``final`` bool[R, S, units]: what arrived after all of what was drawn, where that is more: parameters
    that their owners had delivered all the same.
    """

    exchange: Exchange
    sources: Sequence[int]
    receivers: Sequence[int]
    arrived: np.ndarray
    cut: Sequence[BucketUnits]
    sent: np.ndarray | None = None
    final: np.ndarray | None = None
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def crossing(self) -> np.ndarray:
        """bool[R, S]: the links between two ranks, so not that of a rank to itself."""
        return np.array(self.receivers)[:, None] != np.array(self.sources)

    def incoming(self, units: BucketUnits) -> np.ndarray:
        """bool[S, count]: what of the bucket that is cut into ``units`` arrived at the one receiver, by source."""
        assert len(self.arrived) == 1
        return self.arrived[0][:, units.numbers]

    def outgoing(self, units: BucketUnits) -> np.ndarray:
        """bool[S, count]: what of the one receiver's bucket arrived, by destination."""
        assert self.sent is not None
        return self.sent[:, units.numbers]

    def lost_here(self, units: BucketUnits) -> Lost:
        """What of the bucket did not arrive at the one receiver, by source."""
        return self._once("here", units, lambda: Lost(~self.incoming(units)))

    def lost_there(self, units: BucketUnits) -> Lost:
        """What of the one receiver's bucket did not arrive, by destination."""
        return self._once("there", units, lambda: Lost(~self.outgoing(units)))

    def survivors(self, units: BucketUnits) -> np.ndarray:
        """int[count]: from how many sources each unit of the bucket arrived at the one receiver."""
        return self._once("survivors", units, lambda: self.incoming(units).sum(axis=0))

    def prepare(self) -> None:
        """Work out what recovery will ask for, which may take longer than the draw; on any thread."""
        for units in self.cut:
            if self.exchange.phase == "grad":
                self.survivors(units)
            lost = self.lost_here(units) if self.sent is None else self.lost_there(units)
            for numbers, _ in units.parts:
                lost.places(numbers)

    def _once(self, what: str, units: BucketUnits, find: Callable[[], Any]) -> Any:
        key = (what, units.first, units.count)
        if key not in self._known:
            self._known[key] = find()
        return self._known[key]
