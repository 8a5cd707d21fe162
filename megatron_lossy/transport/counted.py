"""How late receivers are, where nobody can say beforehand: from what they count."""

from __future__ import annotations

import numpy as np

from ..exchange import BucketUnits, Delivery


class Counted:
    """Of the parameters that this rank receives: losses and ages since the run began, in units.

    ``agreed``: the sums over all ranks, as somebody last put them there; until then what this rank counts itself.
    """

    def __init__(self) -> None:
        self._ages: dict[int, np.ndarray] = {}  # by bucket: int32[S, count]
        self._steps: dict[int, int] = {}
        self.sums = np.zeros(3)  # units that were lost, their ages, units that were sent; whole numbers
        self.agreed: np.ndarray | None = None

    def count(self, bucket: int, units: BucketUnits, delivery: Delivery) -> None:
        """Count what arrived of ``bucket``, once for each step."""
        step = delivery.exchange.step
        if self._steps.get(bucket) == step:
            return
        self._steps[bucket] = step
        others = np.array([source not in delivery.receivers for source in delivery.sources])
        lost = delivery.lost_here(units).mask[others]
        ages = self._ages[bucket] = np.where(lost, self._ages.get(bucket, 0) + np.int32(1), np.int32(0))
        self.sums += lost.sum(), ages.sum(), lost.size

    def lag(self) -> tuple[float, float]:
        """The share of units that were lost, and the mean age."""
        lost, ages, sent = self.sums if self.agreed is None else self.agreed
        return (lost / sent, ages / sent) if sent else (0.0, 0.0)
