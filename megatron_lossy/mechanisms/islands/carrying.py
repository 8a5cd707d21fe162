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
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...config import LossyConfig
from ...transport.ends import end_for
from ...transport.leaving import Departures, PeerLost, patiently
from ...transport.peers import bytes_of
from .flags import SYNC_PHASES
from .mean import Form, mean_of
from .membership.messages import Entry
from .monitor import Diary
from .rounds import epoch_of

if TYPE_CHECKING:
    from .connections import Connections, Crossing, Pair

logger = logging.getLogger(__name__)


class Carrier(ABC):
    """Carries one exchange after the other between the islands, in host memory.

    ``senders``: the islands whose weights are averaged, in their order. ``place``: that of this island among them, which owns the means
    of its place; ``None``: it gets means alone. ``observes``: whether the carrier reports losses.
    """

    senders: Sequence[int]
    place: int | None
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
    """Exchanges over gloo with the ranks of this one's place in each island of ``world``. Making one is a collective call of these.

    Tensors are contiguous, of any dtype. ``name``: unique.
    """

    def __init__(self, world: Any, name: str) -> None:
        self.senders, self.place = range(world.islands), world.island
        timeout = timedelta(seconds=world.patience)
        self._group = torch.distributed.ProcessGroupGloo(world.store(name), world.island, world.islands, timeout)

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        received = torch.empty_like(pieces)
        self._group.alltoall_base(bytes_of(received), bytes_of(pieces), [], []).wait()
        return received, None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        received = torch.empty(len(self.senders), *own.shape, dtype=own.dtype)
        self._group._allgather_base(bytes_of(received), bytes_of(own)).wait()
        return received, None

    def total(self, own: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``own`` over all islands, on its device, added up in their order. All call it."""
        first, *others = self.gather(own.detach().cpu().contiguous())[0]
        result = first.clone()
        for other in others:
            result += other
        return result.to(own.device)


class IslandLink(Carrier):
    """Exchanges over a network with the ranks of this one's place in each island of ``world``. Making one is a collective call of these.

    ``most``: the most elements of an exchange. An island that sends nothing for the patience of ``world`` counts as gone, and the
    exchange fails. ``name``: unique.
    """

    observes = True

    def __init__(self, config: LossyConfig, world: Any, name: str, most: int) -> None:
        self.senders, self.place = range(world.islands), world.island
        self.name, self.rank, self._size = f"islands {name}", world.island, world.islands
        form = Form(config)
        self._shard = form.items(form.cut(form.share(form.flat(max(most, 1)), self._size)))
        bucket = (self._shard * form.dtype.itemsize, form.packet * form.dtype.itemsize)
        self._channel = end_for(config).open(
            self.name,
            self.rank,
            self._size,
            world.store(name),
            name,
            {phase: [bucket] for phase in SYNC_PHASES},
            alike=repr((config.sync_subset, list(self.senders), form.code)),
            phases=SYNC_PHASES,
            codes=form.codes,
        )
        #: Return the counters of every other island, and the rates towards it.
        self.counters, self.rates = self._channel.counters, self._channel.rates
        self._begun = 0
        self._hurries = config.udp_deadline_seconds is not None
        self._patience = world.patience
        self._leaving = Departures(config.udp_memory, world.patience)
        self._silent: list[int] = []  # places of islands that sent nothing of their latest message

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        return self._cross(SYNC_PHASES[0], pieces)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        result = self._cross(SYNC_PHASES[1], own[None])
        self._begun += 1
        return result

    def _cross(self, phase: str, given: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``given`` to each island, or the only row to all of them, and get one of each."""
        count = given.shape[1]
        sent = torch.nn.functional.pad(given, (0, self._shard - count))
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

    def close(self) -> None:
        self._channel.close()
        self._leaving.forget()


#: How much longer the means of an island are waited for: it may have waited for another one.
_LONGER = 1.5


class EpochView:
    """The members of ``entry``, number ``number`` of the island ``slot``, as that sees them.

    ``diary``: notes those of which a message does not come.
    """

    def __init__(self, entry: Entry, number: int, slot: int, connections: Connections | None, diary: Diary) -> None:
        self.epoch, self.number, self.slot, self.connections = epoch_of(entry), number, slot, connections
        self._diary = diary
        #: The connections with the others, by slot.
        self.pairs: dict[int, Pair] = {} if connections is None else connections.among(entry)
        self.senders, self.alone = self.epoch.senders, len(self.epoch.members) == 1
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
        what = f"island {self.slot}: lost contact with island {pair.slot}"
        logger.warning("%s (%s); what it does not send in time counts as lost", what, why)

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
            what = f"island {self.slot}: no mean of all islands' weights"
            logger.warning("%s (%s); its own are in its place", what, error)
            return None
        mean = mean_of([theirs.get(slot, own) for slot in self.senders], None)
        return mean.to(shards[0].device).split(list(map(len, shards)))


class Lane(Carrier):
    """The exchange number ``exchange`` of a shard of the island ``slot``, among the members of an epoch; ``None``: nothing is carried.

    ``shard``: the number of the vector on its rank. ``diary``: counts the messages of others.
    """

    observes = True

    def __init__(
        self, config: LossyConfig, among: EpochView | None, slot: int, shard: int, exchange: int, diary: Diary
    ) -> None:
        self.senders, self.place = ([slot], None) if among is None else (among.senders, among.place)
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
        if self.among is None or self.place is None:  # it gets nothing
            return torch.zeros_like(pieces), np.zeros(pieces.shape, dtype=bool)
        return self._cross(0, pieces, self.senders)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        if self.among is None:
            return self.scatter(own[None])
        return self._cross(1, own[None], self.among.epoch.slots)

    def _cross(self, phase: int, rows: torch.Tensor, slots: Sequence[int]) -> tuple[torch.Tensor, np.ndarray]:
        """Send a row of ``rows`` to each of ``slots``, or the only one to all, if this island sends, and get one of each sender."""
        among = self.among
        assert among is not None and among.connections is not None
        buckets, senders, count = among.connections.buckets, self.senders, rows.shape[1]
        bucket, items = buckets.exchange(self._shard, self._turn, len(senders))
        received = torch.zeros(len(senders), items, dtype=rows.dtype)
        arrived = np.zeros((len(senders), -(-items // buckets.packet)), dtype=bool)
        places = {slot: place for place, slot in enumerate(senders)}
        padded = torch.nn.functional.pad(rows, (0, items - count))
        sent = dict(zip(slots, padded.expand(len(slots), -1))) if self.place is not None else {}
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
        if self.place is not None:
            received[self.place], arrived[self.place] = sent[among.slot], True
        if not self._packets:  # a shard has come if all of its packets have
            arrived = arrived.all(axis=1, keepdims=True)
        return received[:, :count], arrived
