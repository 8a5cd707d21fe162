"""The connections of this rank with the ranks of its number on other islands: one for each pair of members, by stream or by datagrams.

A preparation of an epoch names them, and so does the entry that comes of it: no frame counts in another epoch. Exchanges, copies, sums
of all weights, and the entry itself cross by the same connection. Only data that a member does not send in time are lost.
"""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import numpy as np
import torch

from ...base.errors import first_line, host_port
from ...config import LossyConfig
from ...transport.address import resolve
from ...transport.ends import end_for
from ...transport.forks import close_in_children
from ...transport.leaving import Departures, PeerLost
from .copying import PART, Buckets
from .flags import SYNC_PHASES
from .meeting import Meeting, NoAnswer, Talk
from .membership.messages import Entry, Member, Preparation, read, slot_of, write
from .membership.store import Store

logger = logging.getLogger(__name__)

#: Seconds between two looks whether a connection is there, and before it is opened again, at first and at most.
_LOOK, _AGAIN, _MOST_AGAIN = 0.1, 0.5, 30.0
#: Seconds that an end waits for what others still ask for.
LINGER = 5.0
#: Preparations that may yet become entries, that this island has seen.
_ATTEMPTS = 3
#: A member that was waited for in vain is waited for so much shorter, until it is in time again, and so many seconds at least.
_SHORTER, _LONGER, _LEAST = 10.0, 3.0, 0.05


class Crossing(NamedTuple):
    """Messages on their way; that of the other one arrives in ``into``, if it sends one."""

    transfer: Any
    into: torch.Tensor | None


class Pair:
    """The connection with ``other`` for the preparation ``nonce``. A thread opens it, and again if it is lost, until :meth:`close`."""

    def __init__(self, connections: Connections, nonce: str, other: Member) -> None:
        self.other, self.slot, self.nonce, self._connections = other, slot_of(other), nonce, connections
        #: The reason why there is no connection; empty if there is one.
        self.why = "no connection yet"
        #: When something came of it last.
        self.received = -math.inf
        #: Seconds to wait for it.
        self.patience = connections.patience
        self._missed = False
        self._place = int(slot_of(connections.me) > self.slot)
        self._leaving = Departures(connections.memory, connections.patience)
        self._sending = threading.Lock()
        self._channel: Any = None
        self._entry: tuple[Any, torch.Tensor] | None = None
        self._talk: Talk | None = None
        self._closing = threading.Event()
        self._users = 0  # exchanges and copies under way
        self._said = False
        self.thread = threading.Thread(target=self._run, name="megatron-lossy-pair", daemon=True)
        self.thread.start()

    # --- messages ----------------------------------------------------------------------------------------------------

    def begin(
        self,
        phase: str,
        bucket: int,
        number: int,
        out: torch.Tensor | None,
        into: torch.Tensor | None,
        within: float = math.inf,
    ) -> Crossing | None:
        """Send ``out``, and receive into ``into``, the messages ``number`` of ``bucket``; ``None``: nothing crosses that way.

        ``within``: seconds to wait for it. Return ``None`` if there is no connection.
        """
        channel = self._channel
        if channel is None:
            return None
        try:
            transfer = channel.post(phase, number, bucket, self._pointers(into), within=within)
            transfer.keep = out, into
            with self._sending:
                if out is not None and not self._leaving.full:  # an island that takes nothing gets nothing more
                    channel.send(phase, number, bucket, self._pointers(out), self._connections.buckets.must.get(bucket))
                    self._leaving.add(transfer, out.numel() * out.element_size())
            return Crossing(transfer, into)
        except (RuntimeError, ValueError) as error:  # it was closed meanwhile, or that number has been
            logger.debug("island %d: %s", self.slot, error)
            return None

    def end(self, crossing: Crossing | None) -> np.ndarray | None:
        """Wait for the message. Return the units that have come, bool[units]; ``None`` if there is no connection."""
        if crossing is None:
            return None
        try:
            row: np.ndarray = crossing.transfer.wait()[1 - self._place]
        except (RuntimeError, ValueError) as error:
            logger.debug("island %d: %s", self.slot, error)
            return None
        if crossing.into is not None and row.any():
            self.received = time.monotonic()
        if crossing.into is not None and row.all():
            self.patience = min(self.patience * _LONGER, self._connections.patience)
        return row

    def in_vain(self) -> bool:
        """Note that it was waited for in vain: it is waited for shorter from now on. Return whether that is new."""
        new, self._missed = not self._missed, True
        if self.connected:
            self.patience = max(self.patience / _SHORTER, _LEAST)
        return new

    def put(self, role: str, number: int, data: torch.Tensor, seconds: float) -> None:
        """Send ``data`` uint8[n], of at most :data:`PART` bytes. Raise :class:`PeerLost` if it does not leave in ``seconds``."""
        bucket, size = self._connections.buckets.part(role, len(data))
        self.leave(self.begin(SYNC_PHASES[0], bucket, number, _padded(data, size), None), seconds)

    def leave(self, crossing: Crossing | None, seconds: float) -> None:
        """Wait until all of the message has left: the next one of its bucket ends it. Raise :class:`PeerLost` after ``seconds``."""
        try:
            if crossing is None:
                raise PeerLost(self.why)
            crossing.transfer.sent(seconds)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise PeerLost(f"island {self.slot}: {first_line(error)}") from None

    def get(self, role: str, number: int, data: torch.Tensor, seconds: float) -> None:
        """Receive ``data`` uint8[n]. Raise :class:`PeerLost` if it does not come in ``seconds``."""
        bucket, size = self._connections.buckets.part(role, len(data))
        into = torch.zeros(size, dtype=torch.uint8)
        self.take(self.begin(SYNC_PHASES[0], bucket, number, None, into, seconds), data)

    def take(self, crossing: Crossing | None, data: torch.Tensor) -> None:
        """Wait until all of the message is here, and copy it to ``data`` uint8[n]. Raise :class:`PeerLost`."""
        row = self.end(crossing)
        if crossing is None or crossing.into is None or row is None or not row.all():
            raise PeerLost(f"island {self.slot}: {self.why or 'a part did not come'}")
        data.copy_(crossing.into[: len(data)])

    def say(self, entry: Entry) -> None:
        """Send ``entry`` once: the other one may not have read it."""
        channel, data = self._channel, torch.frombuffer(bytearray(write(entry).encode()), dtype=torch.uint8)
        bucket, size = self._connections.buckets.part("entry", len(data))
        out = _padded(data, size)
        try:
            if channel is not None and not self._said:
                self._said = True
                must = self._connections.buckets.must[bucket]
                transfer = channel.send(SYNC_PHASES[1], 1, bucket, self._pointers(out), must)
                transfer.keep = transfer.keep, out
        except (RuntimeError, ValueError) as error:
            logger.debug("island %d: %s", self.slot, error)

    def told(self) -> Entry | None:
        """Return the entry that the other one has sent, if it has."""
        if self._entry is None:
            return None
        transfer, into = self._entry
        if not transfer.arrived[1 - self._place].all():
            return None
        return read(Entry, bytes(into.numpy()).rstrip(b"\0").decode(errors="replace"))

    def _pointers(self, data: torch.Tensor | None) -> list[int | None]:
        pointers: list[int | None] = [None, None]
        pointers[1 - self._place] = None if data is None else data.data_ptr()
        return pointers

    # --- the connection ----------------------------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether the connection stands."""
        return self._channel is not None

    def hold(self, users: int) -> None:
        """Close it only once ``users`` more, or less, have ended, or this process ends."""
        with self._sending:
            self._users += users

    @contextmanager
    def used(self) -> Any:
        """Return a context in which it is not closed."""
        self.hold(1)
        try:
            yield
        finally:
            self.hold(-1)

    def counters(self) -> tuple[dict[str, int], dict[str, float]]:
        """Return the counters and the rates of the present connection."""
        channel, other = self._channel, 1 - self._place
        return ({}, {}) if channel is None else (channel.counters()[other], channel.rates().get(other, {}))

    def close(self) -> None:
        """Close it, on its thread."""
        self._closing.set()

    def _run(self) -> None:
        connections, failed = self._connections, 0
        while not self._closing.is_set():
            try:
                channel = self._open()
            except Exception as error:  # it does not answer, is out of reach, or has another version or key
                if not isinstance(error, NoAnswer) and first_line(error) != self.why:
                    logger.warning("island %d: %s", slot_of(connections.me), first_line(error))
                self.why = first_line(error)
                failed += 1
                self._closing.wait(min(_AGAIN * 2**failed, _MOST_AGAIN))
                continue
            self.patience, self._missed, failed = connections.patience, False, 0
            self.why, self._channel = "", channel
            connections.changed()
            while not self._closing.wait(_LOOK) and not self.why:
                self.why = _why_lost(channel, 1 - self._place)
            while self._users and not connections.ended and not self.why:
                time.sleep(_LOOK)
            self._channel = self._entry = None
            connections.changed()
            channel.close(0.0 if self.why else LINGER)
            with self._sending:
                self._leaving.forget()
        if self._talk is not None:
            self._talk.forget()

    def _open(self) -> Any:
        connections, buckets = self._connections, self._connections.buckets
        slots, former = sorted((slot_of(connections.me), self.slot)), "" if self._talk is None else self._talk.session
        self._talk = Talk(connections.meeting, self.nonce, connections.me, self.other, self._closing, former)
        with self._talk as talk:
            name, more = f"islands {slots[0]} and {slots[1]}", {**buckets.named, "called": slots, "bears": True}
            channel = connections.host.open(name, self._place, 2, talk, "open", buckets.sizes, **more)
        bucket, size = buckets.part("entry", 0)
        into = torch.zeros(size, dtype=torch.uint8)
        transfer = channel.post(SYNC_PHASES[1], 1, bucket, self._pointers(into), within=math.inf)
        transfer.keep = into
        self._entry, self._said = (transfer, into), False
        return channel


def _padded(data: torch.Tensor, size: int) -> torch.Tensor:
    return torch.nn.functional.pad(data, (0, size - len(data)))


def _why_lost(channel: Any, other: int) -> str:
    """Return the reason why ``other`` is done without in ``channel``; empty if it is not."""
    try:
        return str(channel.lost_ranks().get(other, ""))
    except RuntimeError as error:
        return first_line(error)


class Connections:
    """All connections of rank ``rank`` of ``size`` of the island ``me``.

    ``store``: an own one, where the ranks meet. ``most``: see :class:`Buckets`. ``towards``: a host that all islands reach. ``every``:
    seconds between two looks for a preparation.
    """

    name = "islands"

    def __init__(
        self,
        config: LossyConfig,
        store: Store,
        me: Member,
        rank: int,
        size: int,
        most: Sequence[int],
        towards: str,
        every: float,
    ) -> None:
        self.me, self.rank, self.patience, self.memory = me, slot_of(me), config.island_patience, config.udp_memory
        self.buckets = Buckets(config, most)
        self.host = end_for(config, towards)
        self.ended, self._datagrams = False, config.transport == "udp"
        self._changed = threading.RLock()
        self._pairs: dict[str, dict[Member, Pair]] = {}
        self._prepared = ""
        self._numbers: dict[str, int] = {}  # of entries, by what prepares them
        self._kept: set[str] = set()  # that have become entries
        self._listener: socket.socket | None = None
        self._counted: dict[int, Counter[str]] = {}
        self.meeting = Meeting(store, rank, size, me, self._prepare, every)
        self.meeting.begin()

    def _prepare(self, prepared: Preparation) -> None:
        """Connect with the candidates of ``prepared``, on the thread of the meeting."""
        with self._changed:
            self._prepared = prepared.nonce
            self._numbers[prepared.nonce] = prepared.number
            for nonce in [early for early in self._numbers if early not in self._kept][:-_ATTEMPTS]:
                del self._numbers[nonce]
                self._close([nonce])
            self._open(prepared.nonce, prepared.candidates)
        self.changed()

    def listen(self) -> str:
        """Return where this rank is called, HOST:PORT. Of datagrams that is a port of TCP which only answers that the rank is there."""
        address, port = self.host.address, self.host.port
        if self._datagrams:
            family = resolve(address, port)[0]
            try:
                self._listener = socket.create_server((address, port), family=family)
            except OSError:  # another process has this port of TCP
                self._listener = socket.create_server((address, 0), family=family)
            port = close_in_children(self._listener).getsockname()[1]
            threading.Thread(target=self._answer, args=[self._listener], daemon=True).start()
        return host_port(address, port)

    @staticmethod
    def _answer(listener: socket.socket) -> None:
        with suppress(OSError):  # it was closed
            while True:
                listener.accept()[0].close()

    def keep(self, entries: Collection[Entry]) -> None:
        """Close all connections but those of ``entries``, and those that are prepared for later ones."""
        last = max(entry.number for entry in entries)
        with self._changed:
            self._kept = {entry.nonce for entry in entries}
            self._numbers = {nonce: number for nonce, number in self._numbers.items() if number > last}
            kept = self._kept | self._numbers.keys()
            self._close([nonce for nonce in self._pairs if nonce not in kept])

    def _close(self, nonces: Iterable[str]) -> None:
        for nonce in nonces:
            for pair in self._pairs.pop(nonce, {}).values():
                self._count(pair)
                pair.close()

    def among(self, entry: Entry) -> dict[int, Pair]:
        """Return the connections with the members of ``entry``, by slot."""
        with self._changed:
            self._kept.add(entry.nonce)
            return self._open(entry.nonce, entry.members)

    def _open(self, nonce: str, members: Collection[Member]) -> dict[int, Pair]:
        there = self._pairs.setdefault(nonce, {})
        for member in members:
            if member not in there and member != self.me and not self.ended:
                there[member] = Pair(self, nonce, member)
        return {slot_of(member): there[member] for member in members if member in there}

    def changed(self) -> None:
        """Publish the connections of this rank."""
        with self._changed:
            nonce = self._prepared
            there = [pair.other for pair in self._pairs.get(nonce, {}).values() if pair.connected]
        self.meeting.connected(nonce, there)

    @property
    def connected(self) -> tuple[str, set[Member]]:
        """The preparation, and its candidates with which all ranks of this island are connected."""
        nonce = self._prepared
        return nonce, self.meeting.all_connected(nonce)

    @property
    def pairs(self) -> list[Pair]:
        """All connections that are wanted."""
        with self._changed:
            return [pair for there in self._pairs.values() for pair in there.values()]

    def swap(self, pairs: Mapping[int, Pair], count: int, own: torch.Tensor) -> dict[int, torch.Tensor]:
        """Send ``own`` [n], in host memory, to all of ``pairs``, and return theirs [n]. Raise :class:`PeerLost`.

        ``count``: the number of these calls, which rises and is the same on all.
        """
        data = own.view(torch.uint8)
        number = count * -(-len(data) // PART) % 2**31
        found = {slot: torch.empty_like(own) for slot in pairs}
        for first in range(0, len(data), PART):
            bucket, size = self.buckets.part("whole", PART)
            out, part = _padded(data[first : first + PART], size), number + first // PART
            crossing = {}
            for slot, pair in pairs.items():
                into = torch.zeros(size, dtype=torch.uint8)
                crossing[slot] = pair.begin(SYNC_PHASES[0], bucket, part, out, into, self.patience)
            for slot, pair in pairs.items():
                pair.take(crossing[slot], found[slot].view(torch.uint8)[first : first + PART])
                pair.leave(crossing[slot], self.patience)
        return found

    # --- output for the user -------------------------------------------------------------------------------------------

    def _count(self, pair: Pair) -> None:
        self._counted.setdefault(pair.slot, Counter()).update(pair.counters()[0])

    def counters(self) -> dict[int, dict[str, int]]:
        """Return the counters of every other island so far."""
        with self._changed:
            found = {slot: Counter(counts) for slot, counts in self._counted.items()}
        for pair in self.pairs:
            found.setdefault(pair.slot, Counter()).update(pair.counters()[0])
        return {slot: dict(found[slot]) for slot in sorted(found)}

    def rates(self) -> dict[int, dict[str, float]]:
        """Return the rates towards every other island."""
        return {pair.slot: rates for pair in self.pairs if (rates := pair.counters()[1])}

    def close(self) -> None:
        """Close all, once what was sent has left."""
        with self._changed:
            self.ended, pairs = True, self.pairs
            self._close(list(self._pairs))
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)  # or it listens as long as its thread waits
            listener.close()
        self.meeting.end()
        until = time.monotonic() + 2 * LINGER
        for pair in pairs:
            pair.thread.join(max(0.0, until - time.monotonic()))
