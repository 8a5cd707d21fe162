"""The exchanges of a group of ranks over TCP. A unit that has not come at the deadline is lost.

An exchange has a phase, a bucket and a number, which rises. ``post`` gives the memory for pieces of others, ``send`` the pieces for
them. At its end, data that the kernel does not have yet are dropped, and a frame END notes it. Data that arrive before ``post`` are kept.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np

from ...base.errors import UsageError
from ..udp import session
from .deadline import Pace
from .frames import ASK, BYE, DATA, END, LIVE, OVER, Header, MalformedFrame
from .link import LOOKS, Link, OutgoingMessage, Shape
from .transfer import Key, Pointers, Transfer

#: The version of frames, handshakes and entries in the store.
PROTOCOL = 2
#: A rank that is silent for this share of the timeout, and so many seconds at least, is not waited for.
_PATIENCE, _LEAST_PATIENCE = 0.1, 1.0


class Channel:
    """The exchanges of a group of ranks, made by :meth:`.Host.open`.

    Raises :class:`UsageError`, the same on all ranks, if they differ or cannot reach each other.
    """

    def __init__(self, host: Any, opening: session.Opening) -> None:
        self.host, self.name, self.rank, settings = host, opening.name, opening.rank, host.settings
        hellos = session.meet("stream", host, opening, PROTOCOL)
        self.secret = session.Secrets(self.name, 0, hellos, settings.key)
        #: Names the channel in handshakes.
        self.id = self.secret.derive(b"channel")[:16]
        self._memory = settings.memory
        self.plain = settings.cipher == "none"
        self.patience = max(_PATIENCE * settings.peer_timeout, _LEAST_PATIENCE)
        self.deadline = settings.deadline
        self.paces: dict[Key, Pace] = defaultdict(lambda: Pace(settings.arrive))
        self.phases = tuple(opening.phases)
        self._shapes = {phase: [Shape(*sizes) for sizes in opening.cut(phase)] for phase in self.phases}
        self._codes = [session.CODES[opening.code(phase)] for phase in self.phases]
        every = [shape for parts in self._shapes.values() for shape in parts]
        #: Bytes of a payload at most.
        self.most = max((shape.frame * shape.unit for shape in every), default=0)
        self.lock = threading.Condition()
        self.closed = False
        self._transfers: dict[Key, Transfer] = {}  # the latest of each bucket
        self._early: dict[Key, list[tuple[Link, Header, bytes]]] = defaultdict(list)
        self._early_bytes = 0
        self.links = {}
        for peer in opening.others:
            name = f"{opening.named(peer)} ({hellos[peer].where})"
            self.links[peer] = Link(self, peer, hellos[peer], name, dials=peer < self.rank)
        host.channels[self.id] = self
        self.host.ask(self._look)
        try:
            opening.share("opened", b"1")
            for link in self.links.values():
                self.host.ask(link.dial)
            self._reach(opening, hellos, settings.peer_timeout)
        except BaseException:
            self.close(linger=0.0)
            raise

    def _reach(self, opening: session.Opening, hellos: Sequence[session.Hello], seconds: float) -> None:
        """Wait until there is a connection to each other rank."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not all(link.connection for link in self.links.values()):
            time.sleep(0.002)
        missing = {rank: link.problem for rank, link in self.links.items() if not link.connection}
        rows = opening.share("reached", json.dumps(missing).encode())
        for rank in reversed(range(len(rows))):  # of each pair the higher rank has called, and has the reason
            for other, why in json.loads(rows[rank]).items():
                ends = (f"rank {end} of {self.name} ({hellos[end].where})" for end in (rank, int(other)))
                raise UsageError(
                    f"--transport stream: {' does not reach '.join(ends)}: {why}; a firewall has to let TCP connections to "
                    "--udp-port in, and --udp-interface names another path"
                )

    def _look(self) -> None:
        """Ask silent ranks whether they live, while something is waited for.

        Nothing is sent in between: congestion control would take so little data for the rate of the path.
        """
        if not self.closed:
            if any(not transfer.over for transfer in list(self._transfers.values())):
                for link in self.links.values():
                    link.ask()
            self.host.later(LOOKS, self._look)

    # --- exchanges -------------------------------------------------------------------------------------------------

    def post(
        self, phase: str, number: int, bucket: int, destinations: Pointers, *, within: float | None = None
    ) -> Transfer:
        """Give the address for the piece of each source; ``None`` for this rank and for sources that send nothing.

        ``within``: seconds that this exchange may take, in the place of ``--udp-deadline``.
        """
        key = self.phases.index(phase), bucket
        with self.lock:
            if self.closed:
                raise RuntimeError(f"channel {self.name} is closed")
            old = self._transfers.get(key)
            if old is not None:
                if number <= old.number:
                    raise ValueError(f"{phase} {number}, bucket {bucket} of {self.name}: not later than its last step")
                old.end()
            limit = self.deadline if within is None else float(within)
            shape = self._shapes[phase][bucket]
            transfer = self._transfers[key] = Transfer(self, key, number, shape, destinations, limit)
            transfer.arrived[self.rank] = True
            early, self._early[key] = self._early[key], []
            for link, header, payload in early:
                if header.number > number:
                    self._keep(link, header, payload)
                    continue
                self._early_bytes -= len(payload)
                if header.size and not payload:
                    transfer.missed(link.rank, header.units)
                else:
                    self._place(link, header, memoryview(payload))
            for link in self.links.values() if early else ():  # there is room again
                self.host.ask(link.wake)
            return transfer

    def send(self, phase: str, number: int, bucket: int, sources: Pointers, must: np.ndarray | None = None) -> Transfer:
        """Give the address of each destination's piece, after :meth:`post`; ``None``: that rank gets nothing.

        ``must``: units that must arrive; of a stream all do.
        """
        key = self.phases.index(phase), bucket
        header = self._header(END, key, number)
        with self.lock:
            transfer = self._transfers[key]
            assert transfer.number == number
            for rank, address in enumerate(sources):
                if address is not None and not self.links[rank].left:
                    message = OutgoingMessage(header, address, self._shapes[phase][bucket])
                    transfer.leave(rank, message)
                    self.links[rank].put(message)
            return transfer

    def _header(self, kind: int, key: Key, number: int) -> Header:
        return Header(kind, self._codes[key[0]], key[0], number, key[1])

    def give_up(self, transfer: Transfer, key: Key, source: int) -> None:
        """Let ``source`` send no more of ``transfer``. Called with the lock."""
        if self.links[source].connection is not None:
            header = self._header(OVER, key, transfer.number)
            self.links[source].put(OutgoingMessage(header, 0, transfer.shape, dropped=True), first=True)

    def take(self, link: Link, header: Header, payload: memoryview) -> bool:
        """Put a frame where it belongs. Return whether there was room. Raise :class:`MalformedFrame`."""
        with self.lock:
            if header.kind == BYE:
                link.closed = True
                self._leave(link)
                return True
            if link.left or header.kind in (ASK, LIVE):
                return True
            self._check(header)
            current = self._transfers.get((header.phase, header.bucket))
            if header.kind == OVER:
                if current is not None and header.number == current.number:
                    current.drop(link.rank)
                return True
            if current is not None and header.number <= current.number:
                self._place(link, header, payload)
                return True
            if self._early_bytes + len(payload) > self._memory and self._early_bytes:
                if not any(transfer.awaits(link.rank) for transfer in self._transfers.values()):
                    return False
                link.counters["early_dropped"] += header.units  # what is waited for may be behind it
                payload = payload[:0]
            self._early_bytes += len(payload)
            self._keep(link, header, bytes(payload))
            return True

    def _keep(self, link: Link, header: Header, payload: bytes) -> None:
        """Keep a frame of a later exchange than the current one. An END ends that, too."""
        key = header.phase, header.bucket
        if header.kind == END and key in self._transfers:
            self._transfers[key].finished(link.rank)
        self._early[key].append((link, header, payload))

    def _check(self, header: Header) -> None:
        if header.phase >= len(self.phases) or header.bucket >= len(self._shapes[self.phases[header.phase]]):
            raise MalformedFrame(f"{header}: no such bucket")
        shape = self._shapes[self.phases[header.phase]][header.bucket]
        if header.code != self._codes[header.phase]:
            raise MalformedFrame(f"{header}: another code")
        if header.kind == DATA:
            whole = header.units and header.first + header.units <= shape.units
            if not whole or header.size != shape.bytes_of(header.first, header.units):
                raise MalformedFrame(f"{header}: no units of its bucket")

    def _place(self, link: Link, header: Header, payload: memoryview) -> None:
        transfer, counters = self._transfers[header.phase, header.bucket], link.counters
        if transfer.number != header.number or transfer.ended is not None:
            counters["late"] += header.units
            if transfer.number == header.number and transfer.ended is not None:
                counters["late_us"] += header.units * int(1e6 * (time.monotonic() - transfer.ended))
        elif header.kind == END:
            transfer.finished(link.rank)
        else:
            counters["received"] += header.units
            transfer.came(link.rank, header.first, header.units, payload)

    def interrupted(self, link: Link) -> None:
        """A connection of ``link`` broke, and frames were lost in it: once it is back, its rank need not wait for them."""
        with self.lock:
            link.counters["broken"] += 1
            for (phase, bucket), transfer in self._transfers.items():
                transfer.begin(link.rank)
                if link.rank in transfer.leaving:
                    header = self._header(END, (phase, bucket), transfer.number)
                    link.put(OutgoingMessage(header, 0, transfer.shape, dropped=True))
            self.lock.notify_all()

    # --- ranks that are gone ---------------------------------------------------------------------------------------

    def lose(self, rank: int) -> None:
        """Do without ``rank`` from now on: its data to come are lost."""
        with self.lock:
            self._leave(self.links[rank])

    def _leave(self, link: Link) -> None:
        link.left = True
        for transfer in self._transfers.values():
            transfer.finished(link.rank)
        self.lock.notify_all()

    def lost_ranks(self) -> dict[int, str]:
        return {rank: f"{link.called}: {self._why(link)}" for rank, link in self.links.items() if link.left}

    def _why(self, link: Link) -> str:
        if link.closed:
            return "it has closed the channel, or does without this one"
        return f"nothing came for {link.silent:.0f} s" if link.connection else f"no connection: {link.problem}"

    # --- output for the user ---------------------------------------------------------------------------------------

    def copies(self, phase: str, bucket: int, mask: np.ndarray, passes: int = 1) -> None:
        """Do nothing: TCP sends again by itself."""

    def counters(self) -> dict[int, dict[str, int]]:
        with self.lock:
            return {peer: dict(link.counters) for peer, link in self.links.items()}

    def rates(self) -> dict[int, dict[str, float]]:
        """Return, by peer, ``rate``: bytes per second that the kernel last measured; ``rtt_min``: seconds."""
        found = {}
        for peer, link in self.links.items():
            connection = link.connection
            with suppress(OSError):  # it was closed meanwhile
                _, rate, rtt_min, _ = (0, 0.0, 0.0, 0) if connection is None else connection.measured()
                found[peer] = {"rate": rate, "rtt_min": rtt_min}
        return found

    def close(self, linger: float = 5.0) -> None:
        """Close the channel. ``linger``: seconds for what was sent to reach the other hosts."""
        with self.lock:
            if self.closed:
                return
            self.closed = True
        until = time.monotonic() + linger
        self._drain(until)
        for link in self.links.values():
            self.host.ask(partial(link.say, BYE))
        self._drain(until)
        with self.lock:
            for transfer in self._transfers.values():
                transfer.end()
        self.host.channels.pop(self.id, None)
        over = threading.Event()

        def end() -> None:
            for link in self.links.values():
                link.left = True
                if link.connection is not None:
                    link.connection.close("the channel is closed")
            over.set()

        self.host.ask(end)
        over.wait(1.0)

    def _drain(self, until: float) -> None:
        wait = 1e-3
        asked = threading.Event()
        self.host.ask(asked.set)  # after what it was asked before
        asked.wait(max(until - time.monotonic(), 0.0))
        while time.monotonic() < until and not all(link.drained or not link.lives for link in self.links.values()):
            time.sleep(wait)
            wait = min(2 * wait, 0.05)
