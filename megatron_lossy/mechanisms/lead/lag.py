"""The lag of receivers, from the law of their losses, or counted if no law gives it beforehand; and the lead for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...base import theory
from ...base.exchange import BucketUnits, Delivery, Exchange
from ...config import LossyConfig
from ...transport import Transfer, Wire
from ...transport.peers import Peers

#: Units that must have been sent before the counts are used: the share is then right to about 0.1.
_ENOUGH = 100
_HIGHEST = 0.9


class Lag:
    """The lag of the receivers of one rank's parameters in one group; the rules of all its buckets share it.

    ``counted``: the counts of receivers, if neither the flags nor the losses of ``wire`` give their lag.
    """

    def __init__(self, config: LossyConfig, wire: Wire) -> None:
        self._given, self._wire = config.lead, wire
        known = self._given is not None or self._by_law(0) is not None
        self.counted = None if known else ReceiverCounts()

    def _by_law(self, step: int) -> tuple[float, float] | None:
        return self._wire.lag(Exchange("param", self._wire.stream, step))

    def lead(self, step: int) -> tuple[float, float]:
        """Return c and r of the lead of the parameters of ``step``."""
        lag = self._by_law(step)
        if self._given is not None:
            return self._given if lag is None or lag[0] else (0.0, 0.0)
        if lag is None:
            assert self.counted is not None
            lag = self.counted.lag()
        return theory.lead(*lag)


class ReceiverCounts:
    """Losses and ages of the parameters that this rank receives since the run began, in units.

    ``sums``: of this rank. ``coming``: the sums over all ranks; the caller that adds them up sets it. They count from
    the next update on.
    """

    def __init__(self) -> None:
        self._ages: dict[int, np.ndarray] = {}  # by bucket: the age of each unit, int32[S, count]
        self._steps: dict[int, int] = {}
        self.sums = np.zeros(3)  # lost units, their ages, sent units; whole numbers
        self.coming: np.ndarray | None = None
        self._agreed = np.zeros(3)

    def count(self, bucket: int, units: BucketUnits, delivery: Delivery) -> None:
        """Count the lost units of ``bucket``, once for each step."""
        step = delivery.exchange.step
        if self._steps.get(bucket) == step:
            return
        self._steps[bucket] = step
        others = np.array([source not in delivery.receivers for source in delivery.sources])
        lost = delivery.lost_here(units).mask[others]
        ages = self._ages[bucket] = np.where(lost, self._ages.get(bucket, 0) + np.int32(1), np.int32(0))
        self.sums += lost.sum(), ages.sum(), lost.size

    def begin_update(self) -> None:
        """Use the ``coming`` sums from now on."""
        if self.coming is not None:
            self._agreed, self.coming = self.coming, None

    def use_own(self) -> None:
        """Use the sums of this rank alone from now on."""
        self.coming = self.sums.copy()
        self.begin_update()

    def state_dict(self) -> dict[str, Any]:
        """Return the state that must be saved for a run to continue bit for bit."""
        ages = {bucket: torch.from_numpy(ages) for bucket, ages in self._ages.items()}
        coming = None if self.coming is None else self.coming.tolist()
        sums = {"sums": self.sums.tolist(), "agreed": self._agreed.tolist(), "coming": coming}
        return {"ages": ages, "steps": self._steps, **sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self._ages = {bucket: ages.cpu().numpy() for bucket, ages in state["ages"].items()}
        self._steps, self.sums = dict(state["steps"]), np.array(state["sums"])
        self._agreed = np.array(state["agreed"])
        self.coming = None if state["coming"] is None else np.array(state["coming"])

    def lag(self) -> tuple[float, float]:
        """Return the share of units that were lost, and their mean age; zeros while too few units were sent."""
        lost, ages, sent = self._agreed
        return (min(lost / sent, _HIGHEST), max(ages, lost) / sent) if sent >= _ENOUGH else (0.0, 0.0)


class Sums:
    """The counts of the receivers of a stream, added up: those of real ranks, or of all virtual workers.

    ``counted``: of the replicas of this process, one for each of ``peers.local``. Counts are whole numbers, so that their
    sums have the same bits in any order.
    """

    def __init__(self, peers: Peers, counted: Sequence[ReceiverCounts]) -> None:
        self._peers, self._counted = peers, counted
        self._handle = Transfer(None)
        self._adding: list[torch.Tensor] = []

    def begin_update(self) -> None:
        """Use the sums of the update before, and begin to add up again. A collective call.

        That may take until the next update, without a wait.
        """
        self.finish()
        for counts in self._counted:
            counts.begin_update()
        self._adding = [torch.from_numpy(counts.sums.copy()) for counts in self._counted]
        self._handle = self._peers.sum_(self._adding)

    def finish(self) -> None:
        """Wait for the sums that are under way, for the next update."""
        self._handle.wait()
        for counts, sums in zip(self._counted, self._adding):
            counts.coming = sums.numpy()
        self._adding = []
