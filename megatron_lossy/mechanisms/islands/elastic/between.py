"""Exchanges among the members of epochs: :class:`.between_ranks.BetweenRanks` for islands that are launches of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from ....exchange import BucketUnits
from ..aside import Brought, Pieces
from ..between_ranks import BetweenRanks, Crossed, Parties, Waiting
from ..mean import Mean
from .carrying import Among


class Lane:
    """One exchange at a time among the members of an epoch."""

    observes = False

    def __init__(self, among: Among, number: int) -> None:
        self.among, self._number = among, number

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """See :class:`.Carrier`. To a listener nothing arrives."""
        if self.among.place is None:
            self.among.listen(self._number, pieces)
            return torch.zeros_like(pieces), np.zeros(pieces.shape, dtype=bool)
        return self.among.scatter(self._number, pieces), None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return self.among.gather(self._number, own), None

    def close(self) -> None:
        """The epoch is closed, not one lane of it."""


class Nowhere(Lane):
    """Carries nothing: this island is in no epoch that it can exchange in."""

    def __init__(self) -> None:
        pass


class BetweenMembers(BetweenRanks):
    """``among()``: the epoch of the exchange that begins; ``None``: everything of it is lost. ``lanes``: exchanges at once.

    ``breaks``: is called on a thread with an epoch that nothing can be exchanged in any more, and why.
    """

    def __init__(
        self, *arguments: Any, lanes: int, among: Callable[[], Among | None], breaks: Callable[[Among, str], None]
    ) -> None:
        config, stream, island, steps, told = arguments
        super().__init__(config, stream, island, [Nowhere()] * lanes, steps, told)
        self._now, self._breaks = among, breaks

    def begin(self, step: int, sent: torch.Tensor) -> Waiting:
        """See :meth:`BetweenRanks.begin`. An exchange has the same lane on all islands, whatever they have made before."""
        self._begun = (step + 1) // self._config.sync_interval - 1
        return super().begin(step, sent)

    def _parties(self, turn: int) -> Parties:
        among = self._now()
        if among is None or among.broken:
            return Parties([self._island], 0, Nowhere())
        among.begin()
        return Parties(among.senders, among.place, Lane(among, turn))

    def _cross(
        self,
        parties: Parties,
        pieces: Pieces,
        units: BucketUnits,
        drawn: Sequence[np.ndarray | None],
        device: torch.device,
    ) -> Crossed:
        lane = parties.carrier
        if isinstance(lane, Nowhere):
            return self._lost(parties, pieces, units, device)
        assert isinstance(lane, Lane), lane
        try:
            return super()._cross(parties, pieces, units, drawn, device)
        except (RuntimeError, torch.distributed.DistError) as error:  # a member is gone, or silent
            self._breaks(lane.among, (str(error).splitlines() or [""])[0])
            return self._lost(parties, pieces, units, device)
        finally:
            lane.among.end()

    def _lost(self, parties: Parties, pieces: Pieces, units: BucketUnits, device: torch.device) -> Crossed:
        """An exchange of which nothing arrives."""
        owners = len(parties.senders)
        values = torch.zeros(owners * pieces.shard, device=device)
        mean = Mean(values, torch.zeros_like(values, dtype=torch.bool))
        nothing = np.zeros((owners, units.count), dtype=bool)
        return Crossed(mean, Brought(device), [nothing, nothing])
