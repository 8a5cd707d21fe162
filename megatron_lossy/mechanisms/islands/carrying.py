"""Carriers of exchanges between ranks of one number of all islands, in host memory: over gloo, as datagrams, or over streams; and those of
islands that come and go, among the members of an epoch.

In both halves of an exchange a unit that does not arrive in time is lost, and reported. Messages have the length of the longest exchange,
of one launch or of so many senders; shorter ones end in zeros.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...config import LossyConfig
from ...transport.ends import end_for
from ...transport.leaving import Departures, PeerLost, patiently
from .flags import SYNC_PHASES
from .mean import Form, mean_of
from .monitor import Diary
from .rounds import Epoch
from .world import Meeting

if TYPE_CHECKING:
    from .connections import Connections, Crossing, Pair

logger = logging.getLogger(__name__)


class Carrier(ABC):
    """Carries one exchange after the other between the islands, in host memory."""

    #: Whether it reports losses.
    observes = False

    @abstractmethod
    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Send ``pieces`` [M, n], one to each island. Return the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units or more]; ``None``: all. Items that did not arrive are zero.
        """

    @abstractmethod
    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Return [M, n]: ``own`` [n] of every island, and the units that arrived as in :meth:`scatter`."""

    def end(self) -> None:
        """Note that an exchange is over, also if it failed."""

    def close(self) -> None:
        """Close the carrier after the last exchange."""


class Collectives(Carrier):
    """Exchanges over torch among all islands of ``meeting``."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._meeting.all_to_all(pieces), None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self._meeting.all_gather(own), None


class IslandLink(Carrier):
    """Exchanges of this island with others, one after another. One rank of each island opens it, a collective call.

    ``most``: the most elements of an exchange. ``store``: a new store of these ranks. ``patience``: an island that sends nothing for this
    many seconds counts as gone, and the exchange fails.
    """

    observes = True

    def __init__(
        self,
        config: LossyConfig,
        name: str,
        rank: int,
        store: Any,
        most: int,
        patience: float,
    ) -> None:
        self.name, self.rank = f"islands {name}", rank
        self._size, self._patience = size, _ = config.islands, patience
        form = Form(config)
        self._shard = shard = form.items(form.cut(-(-max(most, 1) // size)))
        bucket = (shard * form.dtype.itemsize, form.packet * form.dtype.itemsize)
        buckets = {phase: [bucket] for phase in SYNC_PHASES}
        codes = {} if form.code is None else dict.fromkeys(SYNC_PHASES, str(form.code))
        alike = repr((config.sync_subset, list(range(size)), form.code))
        end = end_for(config)
        self._channel = end.open(
            self.name, rank, size, store, name, buckets, alike=alike, phases=SYNC_PHASES, codes=codes
        )
        self._begun = 0
        self._hurries = config.udp_deadline_seconds is not None
        self._leaving = Departures(config.udp_memory, patience)
        self._silent: list[int] = []  # places of islands that sent nothing of their latest message

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Send ``pieces`` [M, n], one to each island. Return the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units]. Items that did not arrive are zero.
        """
        return self._cross(SYNC_PHASES[0], self._padded(pieces), pieces.shape[1])

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Return [M, n]: ``own`` [n] of every island, and bool[M, units]: the units that came."""
        result = self._cross(SYNC_PHASES[1], self._padded(own[None]), len(own))
        self._begun += 1
        return result

    def _padded(self, rows: torch.Tensor) -> torch.Tensor:
        sent = torch.zeros(len(rows), self._shard, dtype=rows.dtype)
        sent[:, : rows.shape[1]] = rows
        return sent

    def _cross(self, phase: str, sent: torch.Tensor, count: int) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``sent`` to each island, or the only row to all of them, and get one of each."""
        received = torch.zeros(self._size, self._shard, dtype=sent.dtype)
        rows = dict(enumerate(sent if len(sent) > 1 else [sent[0]] * self._size))
        received[self.rank] = rows[self.rank]
        transfer = self._channel.post(phase, self._begun, 0, self._pointers(dict(enumerate(received))))
        transfer.keep = received, sent
        self._channel.send(phase, self._begun, 0, self._pointers(rows, self._left_out()))
        self._leaving.add(transfer, sent.numel() * sent.element_size())
        # Others may have waited as long before they send their means.
        arrived = patiently(transfer.wait, self._patience * (1.0 if phase == SYNC_PHASES[0] else 1.5))
        self._silent = np.flatnonzero(~arrived.any(axis=1)).tolist()
        return received[:, :count], arrived

    def _left_out(self) -> list[int]:
        """Make room for a message. Return the islands that get none.

        Data that a stalled island has not taken stays here. If it grows above ``--udp-memory``, silent islands get
        nothing for a while. Without a deadline every rank waits for them anyway.
        """
        while self._leaving.full:
            if self._hurries and self._silent:
                return self._silent
            self._leaving.wait()
        return []

    def _pointers(self, rows: Mapping[int, torch.Tensor], left_out: Collection[int] = ()) -> list[int | None]:
        """Return the address of each place's row; ``None`` for this island, and for those that get none."""
        there = rows.keys() - {self.rank} - set(left_out)
        return [rows[place].data_ptr() if place in there else None for place in range(self._size)]

    def counters(self) -> dict[int, dict[str, int]]:
        """Return counters of every other island."""
        return self._channel.counters()

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards every other island."""
        return self._channel.rates()

    def close(self) -> None:
        self._channel.close()
        self._leaving.forget()


#: How much longer the means of an island are waited for: it may have waited for another one.
_LONGER = 1.5


class EpochView:
    """The members of ``epoch``, number ``number`` of the island ``slot``, as that sees them.

    ``pairs``: its connections with the others, by slot. ``diary``: notes those of which a message does not come.
    """

    def __init__(
        self,
        epoch: Epoch,
        number: int,
        slot: int,
        connections: Connections | None,
        pairs: Mapping[int, Pair],
        diary: Diary,
    ) -> None:
        self.number = number
        self.epoch, self.slot, self.connections, self.pairs, self._diary = epoch, slot, connections, pairs, diary
        self.senders, self.alone = epoch.senders, len(epoch.members) == 1
        #: The place of this island among the senders, or ``None``: it listens.
        self.place = self.senders.index(slot) if slot in self.senders else None

    def hold(self, users: int) -> None:
        """See :meth:`.Pair.hold`."""
        for pair in self.pairs.values():
            pair.hold(users)

    def loses(self, pair: Pair, waited: float) -> None:
        """Note, on a thread, that ``pair`` was waited for in vain."""
        why = pair.why or "it sends nothing"
        self._diary.note("lost contact", with_island=pair.slot, seconds=round(waited, 3), why=why)
        logger.warning(
            "island %d: lost contact with island %d (%s); what it does not send in time counts as lost",
            *(self.slot, pair.slot, why),
        )

    def means(self, shards: Sequence[torch.Tensor], count: int) -> Sequence[torch.Tensor] | None:
        """Return the means of ``shards`` [n] over the senders, added up in their order. ``count``: see :meth:`.Connections.swap`.

        Return ``None`` on an island that does not send, and if one of the others is lost.
        """
        if self.place is None or self.connections is None:
            return None
        others = {slot: self.pairs[slot] for slot in self.senders if slot != self.slot}
        own = torch.cat([shard.detach().cpu() for shard in shards])
        try:
            theirs = self.connections.swap(others, count, own)
        except PeerLost as error:
            logger.warning(
                "island %d: no mean of all islands' weights (%s); its own are in its place", self.slot, error
            )
            return None
        mean = mean_of([theirs.get(slot, own) for slot in self.senders], None)
        return mean.to(shards[0].device).split(list(map(len, shards)))


class Lane(Carrier):
    """The exchange number ``exchange`` of a shard among the members of an epoch; ``None``: nothing is carried.

    ``shard``: the number of the vector on its rank. ``diary``: counts the messages of others.
    """

    observes = True

    def __init__(
        self,
        config: LossyConfig,
        among: EpochView | None,
        shard: int,
        exchange: int,
        diary: Diary,
    ) -> None:
        deadline = config.udp_deadline_seconds
        self.among, self._shard, self._turn = among, shard, exchange % config.lanes
        self._deadline = deadline if isinstance(deadline, float) else None
        self._packets = config.loss_unit == "packet"
        self._exchange, self._diary = exchange, diary
        self._expected, self._came = 0 if among else 1, 0.0
        if among is not None:
            among.hold(1)

    def end(self) -> None:
        if self.among is not None:
            self.among.hold(-1)
        self._diary.ended(self._exchange, self._expected, self._came)

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        if self.among is None or self.among.place is None:  # it gets nothing
            return torch.zeros_like(pieces), np.zeros(pieces.shape, dtype=bool)
        return self._cross(0, pieces, self.among.senders)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        if self.among is None:
            return self.scatter(own[None])
        return self._cross(1, own[None], self.among.epoch.slots)

    def _cross(self, phase: int, rows: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``rows`` to each of ``slots``, or the only one to all, if this island sends, and get one of each sender."""
        among = self.among
        assert among is not None and among.connections is not None
        buckets, senders, count = among.connections.buckets, among.senders, rows.shape[1]
        bucket, items = buckets.exchange(self._shard, self._turn, len(senders))
        received = torch.zeros(len(senders), items, dtype=rows.dtype)
        arrived = np.zeros((len(senders), -(-items // buckets.packet)), dtype=bool)
        places = {slot: place for place, slot in enumerate(senders)}
        padded = torch.nn.functional.pad(rows, (0, items - count))
        sent = dict(zip(slots, padded.expand(len(slots), -1))) if among.place is not None else {}
        began = time.monotonic()
        crossings: dict[int, Crossing | None] = {}
        for slot, pair in among.pairs.items():
            out = sent.get(slot)
            into = received[places[slot]] if slot in places else None
            within = pair.patience * (_LONGER if phase else 1.0)
            if self._deadline is not None:
                within = min(within, self._deadline)
            if out is not None or into is not None:
                crossings[slot] = pair.begin(SYNC_PHASES[phase], bucket, self._exchange, out, into, within)
        for slot, crossing in crossings.items():
            row = among.pairs[slot].end(crossing)
            if slot not in places:
                continue
            self._expected += 1
            if row is not None and row.any():
                arrived[places[slot]] = row
                self._came += float(row.mean())
            elif among.pairs[slot].in_vain():
                among.loses(among.pairs[slot], time.monotonic() - began)
        if among.place is not None:
            received[among.place], arrived[among.place] = sent[among.slot], True
        if not self._packets:  # a shard has come if all of its packets have
            arrived = arrived.all(axis=1, keepdims=True)
        return received[:, :count], arrived
