"""The way to one other rank: the messages that wait for it, and the connection that carries them."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter, deque
from typing import Any

from ..address import resolve
from ..udp.session import Hello
from .connection import Connection, Handshake
from .frames import ASK, DATA, Header, Writer

logger = logging.getLogger(__name__)

#: Bytes of a frame at most, and at least; in between a 16th of a message, so that a deadline loses little of it that has come.
_FRAME_BYTES, _LEAST_FRAME_BYTES, _FRAMES = 2**18, 2**14, 16
#: Seconds between looks at ranks that are waited for. They are asked after two.
LOOKS = 0.25
#: After a packet was missing, the way is taken for one that loses packets during so many looks.
_LOSSY_LOOKS = 20
#: Seconds before a broken connection is dialed again, at first and at most.
_REDIAL = 0.05, 2.0


class Shape:
    """A bucket: bytes of a ``shard`` and of a ``unit``."""

    def __init__(self, shard: int, unit: int) -> None:
        self.shard, self.unit = shard, unit
        self.units = -(-shard // unit)
        #: Units of a frame.
        self.frame = max(1, min(max(-(-self.units // _FRAMES), _LEAST_FRAME_BYTES // unit), _FRAME_BYTES // unit))

    def bytes_of(self, first: int, count: int) -> int:
        return min((first + count) * self.unit, self.shard) - first * self.unit


class OutgoingMessage:
    """A message to one rank: the units at ``address``, and once it is :attr:`dropped` only ``header``, an END."""

    def __init__(self, header: Header, address: int, shape: Shape, dropped: bool = False) -> None:
        self.header, self._address, self._shape, self.dropped = header, address, shape, dropped
        self.place = header.phase, header.bucket
        self._next = 0
        self.sent = False

    def next_frame(self, writer: Writer) -> tuple[memoryview, int]:
        shape, first = self._shape, self._next
        if self.dropped:
            self.sent = True
            return writer.frame(self.header), 0
        units = min(shape.frame, shape.units - first)
        self._next += units
        self.sent = self._next == shape.units
        header = self.header._replace(kind=DATA, first=first, units=units, size=shape.bytes_of(first, units))
        return writer.frame(header, self._address + first * shape.unit), units


class Link:
    """The connection to one other rank, and the messages for it. All but :meth:`put` runs on the host's thread.

    ``channel``: the :class:`.Channel`. ``called``: its name in messages. ``dials``: whether this rank calls it.
    """

    def __init__(self, channel: Any, rank: int, hello: Hello, called: str, dials: bool) -> None:
        self.channel, self.rank, self.hello, self.called, self._dials = channel, rank, hello, called, dials
        self.connection: Connection | None = None
        self.counters: Counter[str] = Counter()
        self.problem = "no answer" if dials else "it has not called"
        #: Seconds that it was waited for since its last sign of life: those in which this process was stopped do not count.
        self.silent = 0.0
        #: Seconds of the shortest round trip.
        self.round_trip = 0.0
        self._behind = 0  # packets of the connection that came behind a missing one
        self._lossy = 0  # looks during which the way still counts as one that loses packets
        #: Whether it is done without, and whether that is because it has closed the channel.
        self.left = self.closed = False
        self._messages: deque[OutgoingMessage] = deque()
        self._pause = _REDIAL[0]

    @property
    def lives(self) -> bool:
        """Whether it may be waited for."""
        return not self.left and self.silent < self.channel.patience

    def ask(self) -> None:
        """Note that it is waited for, and ask whether it lives, unless frames come."""
        self.silent += LOOKS
        self._lossy -= 1
        self._measure()
        if self.silent > 2 * LOOKS:
            self.say(ASK)

    @property
    def loses(self) -> bool:
        """Whether packets were lately missing on the way from it."""
        return self.connection is None or self._lossy > 0

    def _measure(self) -> None:
        """Note the round trip, and whether packets were missing since this was last noted."""
        if self.connection is not None:
            _, _, self.round_trip, behind = self.connection.measured()
            if behind is None or behind > self._behind:
                self._lossy = _LOSSY_LOOKS
            self._behind = behind or 0

    def read(self) -> None:
        if self.connection is not None:
            self.connection.read()
        self._measure()

    def dial(self) -> None:
        """Open the connection, if it is this rank that dials."""
        host = self.channel.host
        if not self._dials or self.left or self.channel.closed:
            return
        family, address = resolve(self.hello.address, self.hello.port)
        made = host.new_socket(family)
        made.setblocking(False)
        error = made.connect_ex(address)
        handshake = Handshake(host, made, self.failed, self)
        if error not in (0, errno.EINPROGRESS):
            handshake.fail(os.strerror(error))

    def failed(self, why: str | None) -> None:
        """Dial again after a while; ``None``: it has not failed."""
        if why is None:
            return
        self.problem = why
        if self._dials:
            self._pause, pause = min(2 * self._pause, _REDIAL[1]), self._pause
            self.channel.host.later(pause, self.dial)

    def connected(self, connection: Connection) -> None:
        """Take a connection that is authentic in place of an older one."""
        old, self.connection = self.connection, connection
        if old is not None:
            old.close("it has called again")
        self._pause, self._behind = _REDIAL[0], 0
        self._measure()
        with self.channel.lock:
            self.counters["connected"] += 1
        if self.counters["broken"]:
            logger.warning("stream: %s is connected again", self.called)

    def broken(self, connection: Connection, why: str) -> None:
        """Do without a connection that is closed. Its data under way are lost."""
        with self.channel.lock:
            self.counters["malformed"] += connection.malformed
        ends = self.left or self.channel.closed
        if connection.known:
            if not ends:
                self.channel.interrupted(self)
            if self.connection is not connection:
                return  # a newer one has taken its place
            self.connection = None
            if not ends:
                logger.warning("stream: %s: %s; what it sends is lost until it is connected again", self.called, why)
        self.failed(why)

    def take(self, header: Header, payload: memoryview) -> bool:
        """Take a frame. Return whether there was room."""
        self.silent = 0.0
        return self.channel.take(self, header, payload)

    def put(self, message: OutgoingMessage, first: bool = False) -> None:
        """Send ``message`` behind those that wait, or before them. Called with the channel's lock."""
        if self.connection is None:  # one END of a bucket says that all before it are over
            self._messages = deque(
                waiting for waiting in self._messages if not (waiting.dropped and waiting.place == message.place)
            )
        self._messages.insert(0 if first else len(self._messages), message)
        self.channel.host.ask(self.wake)

    def wake(self) -> None:
        if self.connection is not None:
            self.connection.wake()

    def say(self, kind: int) -> None:
        if self.connection is not None:
            self.connection.say(kind)

    def wants_to_send(self) -> bool:
        return bool(self._messages)

    @property
    def drained(self) -> bool:
        """Whether the other host has acknowledged all that was put. May be called on any thread."""
        connection = self.connection
        return connection is None or not (self._messages or connection.unacknowledged)

    def next_frame(self, writer: Writer) -> memoryview:
        """Return the next frame of the oldest message; empty without any."""
        with self.channel.lock:
            if not self._messages:
                return memoryview(b"")
            message = self._messages[0]
            frame, units = message.next_frame(writer)
            if message.sent:
                self._messages.popleft()
                self.channel.lock.notify_all()
            self.counters["sent"] += units
            self.counters["sent_bytes"] += len(frame)
            return frame
