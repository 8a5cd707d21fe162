"""Exchanges among the members of epochs: :class:`.between_ranks.RankExchanges` for islands that come and go."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ...config import LossyConfig
from .between_ranks import CopyMark, Outcome, Parties, RankExchanges, Task, Waiting
from .carrying import Carrier
from .connections import Connections, Crossing, Pair
from .flags import SYNC_PHASES
from .mean import mean_of
from .presence import Epoch
from .rounds import Mean
from .vector import Places

#: How much longer the means of an island are waited for: it may have waited for another one.
_LONGER = 1.5


class EpochView:
    """The members of ``epoch``, number ``number`` of the island ``slot``, as that sees them.

    ``pairs``: its connections with the others, by slot. ``loses``: is called on a thread with one of them of which a message does not
    come, if that is new, and the seconds that it was waited for.
    """

    def __init__(
        self,
        epoch: Epoch,
        number: int,
        slot: int,
        connections: Connections | None,
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

    def means(self, shards: Sequence[torch.Tensor], count: int) -> list[torch.Tensor]:
        """Return the means of ``shards``, in host memory, over the senders, added up in their order. Raise :class:`PeerLost`.

        ``count``: the number of these means, which rises and is the same on all senders.
        """
        assert self.connections is not None
        number = count * sum(map(Connections.parts, shards)) % 2**31
        others, found = {slot: self.pairs[slot] for slot in self.senders if slot != self.slot}, []
        for own in shards:
            theirs = self.connections.swap(others, number, own)
            found.append(mean_of([theirs.get(slot, own) for slot in self.senders], None))
            number += Connections.parts(own)
        return found


class Lane(Carrier):
    """The exchange number ``exchange`` of a shard among the members of an epoch; ``None``: nothing is carried."""

    observes = True

    def __init__(
        self,
        among: EpochView | None,
        shard: int = 0,
        turn: int = 0,
        exchange: int = -1,
        config: LossyConfig | None = None,
    ) -> None:
        deadline = None if config is None else config.udp_deadline_seconds
        self.among, self._shard, self._turn = among, shard, turn
        self._deadline = deadline if isinstance(deadline, float) else None
        self._packets = config is None or config.loss_unit == "packet"
        self.exchange = exchange
        #: The messages that others send, and how many have come; a part of one is a fraction.
        self.expected, self.came = 0, 0.0

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`. An island that does not send gets nothing."""
        assert self.among is not None, self.exchange
        if self.among.place is None:
            assert self.among.connections is not None
            units = -(-pieces.shape[1] // self.among.connections.buckets.packet)
            return torch.zeros_like(pieces), np.zeros((len(pieces), units), dtype=bool)
        return self._cross(0, dict(zip(self.among.senders, pieces)))

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """See :class:`.Carrier`."""
        assert self.among is not None, self.exchange
        return self._cross(1, dict.fromkeys(self.among.epoch.slots, own))

    def _cross(self, phase: int, rows: Mapping[int, torch.Tensor]) -> tuple[torch.Tensor, np.ndarray]:
        """Send each of ``rows``, by slot, if this island sends, and get one of each sender."""
        among = self.among
        assert among is not None and among.connections is not None
        buckets = among.connections.buckets
        senders, count = among.senders, len(next(iter(rows.values())))
        bucket, items = buckets.exchange(self._shard, self._turn, len(senders))
        like = next(iter(rows.values()))
        received = torch.zeros(len(senders), items, dtype=like.dtype)
        arrived = np.zeros((len(senders), -(-items // buckets.packet)), dtype=bool)
        places = {slot: place for place, slot in enumerate(senders)}
        sends = among.place is not None
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
            self.expected += 1
            if row is not None and row.any():
                arrived[places[slot]] = row
                self.came += float(row.mean())
            elif among.pairs[slot].in_vain():
                among.loses(among.pairs[slot], time.monotonic() - began)
        if among.place is not None:
            received[among.place, :count], arrived[among.place] = rows[among.slot], True
        if not self._packets:  # a shard has come if all of its packets have
            arrived = arrived.all(axis=1, keepdims=True)
        return received[:, :count], arrived


class MemberExchanges(RankExchanges):
    """``shard``: the number of this vector on its rank.

    ``among()``: the epoch of the exchange that begins; ``None``: everything of it is lost. ``ended``: is called on a thread with the
    number of an exchange, the messages that others send in it, and how many have come.
    """

    def __init__(
        self,
        *arguments: Any,
        shard: int,
        among: Callable[[], EpochView | None],
        ended: Callable[[int, int, float], None],
    ) -> None:
        config, stream, island, steps, told = arguments
        super().__init__(config, stream, island, [Lane(None)] * config.lanes, steps, told)
        self._shard, self._now, self._ended = shard, among, ended

    def begin(self, step: int, sent: torch.Tensor, places: Places | None = None) -> Waiting:
        """See :meth:`RankExchanges.begin`. An exchange has the same lane on all islands, whatever they have made before."""
        self._begun = (step + 1) // self._config.sync_interval - 1
        return super().begin(step, sent, places)

    def _parties(self, turn: int) -> Parties:
        among, exchange = self._now(), self._begun - 1
        if among is None:
            return Parties([self._island], 0, Lane(None, exchange=exchange))
        among.hold(1)
        return Parties(among.senders, among.place, Lane(among, self._shard, turn, exchange, self._config))

    def _cross(self, task: Task) -> Outcome:
        lane = task.parties.carrier
        assert isinstance(lane, Lane), lane
        if lane.among is None:
            self._ended(lane.exchange, 1, 0.0)
            return _nothing(task)
        try:
            crossed = super()._cross(task)
        finally:
            lane.among.hold(-1)
        self._ended(lane.exchange, lane.expected, lane.came)
        return crossed


def _nothing(task: Task) -> Outcome:
    """Return an exchange of which nothing arrives."""
    pieces, owners = task.pieces, len(task.parties.senders)
    values = torch.zeros(owners * pieces.shard, device=pieces.device)
    mean = Mean(values, torch.zeros_like(values, dtype=torch.bool))
    nothing = np.zeros((owners, pieces.units.count), dtype=bool)
    return Outcome(mean, CopyMark(pieces.device), [nothing, nothing])
