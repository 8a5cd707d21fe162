"""Exchanges among the members of epochs: :class:`.between_ranks.BetweenRanks` for islands that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...base import device
from ...config import LossyConfig
from .between_ranks import BetweenRanks, Brought, Crossed, Parties, Task, Waiting
from .carrying import Carrier
from .elastic.connections import Connections, Crossing, Pair
from .epochs import Epoch
from .flags import SYNC_PHASES
from .rounds import Mean
from .vector import Places

#: How much longer the means of an island are waited for: it may have waited for another one.
_LONGER = 1.5


class Among:
    """The members of ``epoch``, number ``number`` of the island ``slot``, as that sees them.

    ``pairs``: its connections with the others, by slot. ``loses``: is called on a thread with one of them of which a message does not
    come, if that is new, and the seconds that it was waited for.
    """

    def __init__(
        self,
        epoch: Epoch,
        number: int,
        slot: int,
        connections: Connections,
        pairs: Mapping[int, Pair],
        loses: Callable[[Pair, float], None],
    ) -> None:
        self.number = number
        self.epoch, self.slot, self.connections, self.pairs, self.loses = epoch, slot, connections, pairs, loses
        self.senders = epoch.senders
        #: The place of this island among the senders, or ``None``: it listens.
        self.place = self.senders.index(slot) if slot in self.senders else None

    def hold(self, users: int) -> None:
        """See :meth:`.Pair.hold`."""
        for pair in self.pairs.values():
            pair.hold(users)


class Lane(Carrier):
    """The exchange number ``exchange`` of a shard among the members of an epoch; ``None``: nothing is carried.

    ``whole``: a part of it is of no use.
    """

    observes = True

    def __init__(
        self,
        among: Among | None,
        shard: int = 0,
        turn: int = 0,
        exchange: int = -1,
        whole: bool = False,
        config: LossyConfig | None = None,
    ) -> None:
        deadline = None if config is None else config.udp_deadline_seconds
        self.among, self._shard, self._turn, self._whole = among, shard, turn, whole
        self._deadline = deadline if isinstance(deadline, float) else None
        self._packets = config is None or config.loss_unit == "packet"
        self.exchange = exchange
        #: Whether nothing of others has come, and whether something is missing that it is of no use without.
        self.alone, self.broken = True, False

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`. Nothing comes to who does not send."""
        assert self.among is not None, self.exchange
        if self.among.place is None:
            units = -(-pieces.shape[1] // self.among.connections.buckets.packet)
            return torch.zeros_like(pieces), np.zeros((len(pieces), units), dtype=bool)
        return self._cross(0, dict(zip(self.among.senders, pieces)))

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`."""
        assert self.among is not None, self.exchange
        return self._cross(1, dict.fromkeys(self.among.epoch.slots, own))

    def _cross(self, phase: int, rows: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, np.ndarray]:
        """Send each of ``rows``, by slot, if this island sends, and get one of each sender."""
        among, buckets = self.among, self.among.connections.buckets  # type: ignore[union-attr]
        assert among is not None
        senders, count = among.senders, len(next(iter(rows.values())))
        bucket, items = buckets.exchange(self._shard, self._turn, len(senders))
        like = next(iter(rows.values()))
        received = torch.zeros(len(senders), items, dtype=like.dtype)
        arrived = np.zeros((len(senders), -(-items // buckets.packet)), dtype=bool)
        places = {slot: place for place, slot in enumerate(senders)}
        sends = among.place is not None and not self.broken
        padded = dict[int, torch.Tensor]()
        for row in rows.values() if sends else ():
            if id(row) not in padded:
                padded[id(row)] = torch.nn.functional.pad(row, (0, items - count))
        began, crossings = time.monotonic(), dict[int, Crossing | None]()
        for slot, pair in among.pairs.items():
            out = padded[id(rows[slot])] if sends and slot in rows else None
            into = received[places[slot]] if slot in places else None
            within = pair.patience * (_LONGER if phase else 1.0)
            if self._deadline is not None:
                within = min(within, self._deadline)
            if out is not None or into is not None:
                crossings[slot] = pair.begin(SYNC_PHASES[phase], bucket, self.exchange, out, into, within)
        for slot, crossing in crossings.items():
            row = among.pairs[slot].end(crossing)
            if slot not in places:
                continue
            if row is not None and row.any():
                arrived[places[slot]], self.alone = row, False
            elif among.pairs[slot].in_vain():
                among.loses(among.pairs[slot], time.monotonic() - began)
        if among.place is not None:
            received[among.place, :count], arrived[among.place] = rows[among.slot], True
        if self._whole and not arrived.all():
            self.broken = True
        if not self._packets:  # a shard has come if all of its packets have
            arrived = np.broadcast_to(arrived.all(axis=1, keepdims=True), (len(senders), items + 1))
        return received[:, :count], arrived


class BetweenMembers(BetweenRanks):
    """``shard``: the number of this vector on its rank.

    ``among()``: the epoch of the exchange that begins; ``None``: everything of it is lost. ``loses``: is called on a thread with the
    number of an exchange of which nothing arrives from others. ``agrees``: on all ranks that have copies of the same parameters, a
    collective call of theirs, whether all have the same number.
    """

    def __init__(
        self,
        *arguments: Any,
        shard: int,
        among: Callable[[], Among | None],
        loses: Callable[[int], None],
        agrees: Callable[[int], bool] | None = None,
    ) -> None:
        config, stream, island, steps, told = arguments
        super().__init__(config, stream, island, [Lane(None)] * config.lanes, steps, told)
        self._shard, self._now, self._loses, self._agrees = shard, among, loses, agrees
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
        if among is None:
            return Parties([self._island], 0, Lane(None, exchange=exchange))
        among.hold(1)
        lane = Lane(among, self._shard, turn, exchange, self._agrees is not None, self._config)
        return Parties(among.senders, among.place, lane)

    def _cross(self, task: Task) -> Crossed:
        lane = task.parties.carrier
        assert isinstance(lane, Lane), lane
        if lane.among is None:
            return self._lost(task, lane.exchange)
        try:
            crossed = super()._cross(task)
        finally:
            lane.among.hold(-1)
        if lane.broken:
            return self._lost(task, lane.exchange)
        if lane.alone and len(lane.among.epoch.slots) > 1:
            self._loses(lane.exchange)
        return crossed

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


def same_everywhere(group: dist.ProcessGroup, number: int) -> bool:
    """Whether all ranks of ``group`` have the same ``number``, of at least 0. A collective call."""
    known = torch.tensor([number, -number], device=device.current_device())
    dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
    most, least = known.tolist()
    return bool(most == -least >= 0)
