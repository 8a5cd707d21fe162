"""Exchanges among the members of epochs: :class:`.between_ranks.BetweenRanks` for islands that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ...base.errors import first_line
from .between_ranks import BetweenRanks, Brought, Crossed, Parties, Task, Waiting
from .carrying import Among, Carrier
from .rounds import Mean
from .vector import Places


class Lane(Carrier):
    """The exchange number ``exchange`` of a shard among the members of an epoch; ``None``: nothing is carried.

    ``observes``: as that of its carrier.
    """

    def __init__(
        self, among: Among | None, shard: int = 0, turn: int = 0, exchange: int = -1, observes: bool = False
    ) -> None:
        self.among, self._shard, self._turn = among, shard, turn
        self.observes, self.exchange = observes, exchange

    def _carrier(self) -> Carrier:
        assert self.among is not None, self.exchange
        return self.among.lane(self._shard, self._turn)

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """See :class:`.Carrier`. Raises :class:`RuntimeError`: the epoch is closed."""
        return self._carrier().scatter(pieces)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """See :class:`.Carrier`. Raises :class:`RuntimeError`: the epoch is closed."""
        return self._carrier().gather(own)


class BetweenMembers(BetweenRanks):
    """``shard``: the number of this vector on its rank.

    ``among()``: the epoch of the exchange that begins; ``None``: everything of it is lost. ``breaks``: is called on a thread with an
    epoch that nothing can be exchanged in any more, why, and the seconds that were waited. ``loses``: with the number of an exchange of
    which nothing arrives from others. ``agrees``: on all ranks that have copies of the same parameters, a collective call of theirs,
    whether all have the same number.
    """

    def __init__(
        self,
        *arguments: Any,
        shard: int,
        among: Callable[[], Among | None],
        breaks: Callable[[Among, str, float], None],
        loses: Callable[[int], None],
        agrees: Callable[[int], bool] | None = None,
    ) -> None:
        config, stream, island, steps, told = arguments
        super().__init__(config, stream, island, [Lane(None)] * config.lanes, steps, told)
        self._shard, self._now, self._breaks, self._loses = shard, among, breaks, loses
        self._agrees = agrees
        self._gone: set[int] = set()  # exchanges of which nothing has arrived here, and that are not used yet

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> Waiting:
        """See :meth:`BetweenRanks.begin`. An exchange has the same lane on all islands, whatever they have made before."""
        self._begun = (step + 1) // self._config.sync_interval - 1
        exchange, among = self._begun, self._now()
        waiting = super().begin(step, sent, places)
        if self._agrees is not None:
            waiting.agrees = partial(self._everywhere, exchange, among)
        return waiting

    def _everywhere(self, exchange: int, among: Among | None) -> bool:
        """Whether ``exchange`` was made, in the same epoch, by all ranks that have copies of the same parameters.

        Else none of them uses it: the copies must not come apart.
        """
        assert self._agrees is not None
        made = among is not None and exchange not in self._gone
        self._gone.discard(exchange)
        return self._agrees(among.epoch.number if made and among is not None else -1)

    def _parties(self, turn: int) -> Parties:
        among, exchange = self._now(), self._begun - 1
        if among is None or among.broken:
            return Parties([self._island], 0, Lane(None, exchange=exchange))
        among.begin()
        lane = Lane(among, self._shard, turn, exchange, self._config.observed)
        return Parties(among.senders, among.place, lane)

    def _cross(self, task: Task) -> Crossed:
        lane = task.parties.carrier
        assert isinstance(lane, Lane), lane
        if lane.among is None:
            return self._lost(task, lane.exchange)
        began = time.monotonic()
        try:
            crossed = super()._cross(task)
            if lane.among.alone:
                self._loses(lane.exchange)
            elif len(lane.among.epoch.slots) > 1:
                lane.among.met = True
            return crossed
        except (RuntimeError, torch.distributed.DistError) as error:  # a member is gone, or silent
            self._breaks(lane.among, first_line(error), time.monotonic() - began)
            return self._lost(task, lane.exchange)
        finally:
            lane.among.end()

    def _lost(self, task: Task, exchange: int) -> Crossed:
        """Return an exchange of which nothing arrives, and note its number ``exchange``."""
        self._loses(exchange)
        if self._agrees is not None:
            self._gone.add(exchange)
        pieces, owners = task.pieces, len(task.parties.senders)
        values = torch.zeros(owners * pieces.shard, device=pieces.device)
        mean = Mean(values, torch.zeros_like(values, dtype=torch.bool))
        nothing = np.zeros((owners, pieces.units.count), dtype=bool)
        return Crossed(mean, Brought(pieces.device), [nothing, nothing])
