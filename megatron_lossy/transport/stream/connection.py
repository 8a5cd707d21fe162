"""One TCP connection between two ranks of a channel: the handshake, then frames in both directions.

The dialer sends the channel's name, its rank and a random number; the listener answers with another. Each proves the channel's secret
over what was said. Everything here runs on the host's thread, and nothing waits.
"""

from __future__ import annotations

import fcntl
import hmac
import os
import selectors
import socket
import struct
import termios
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from .cipher import Cipher, NoCipher
from .frames import ASK, LIVE, Header, MalformedFrame, Reader, Writer

_MAGIC = b"mlstream"
_CALL = struct.Struct("<8s16sI16s32s")  # magic, channel, rank, random, proof
_REPLY = struct.Struct("<16s32s")  # random, proof
#: Bytes that the kernel keeps at least besides those that are on the way: what is dropped when an exchange is over is not among them.
UNSENT_BYTES = 2**17
NOTSENT_LOWAT = 25  # of Linux; Python's socket lacks it before 3.12
#: Seconds for a connection and its handshake.
HANDSHAKE_SECONDS = 5.0
#: The most frames that are read or written at a turn: other connections wait. All that the kernel takes has to be written in one, and
#: the rest be tried again after so many seconds: it calls a socket writable when a third of its buffer is free, and packets behind a
#: lost one fill it for a round trip.
_READS, _WRITES, _AGAIN = 4, 64, 0.004
#: The kernel has to say that data has come before it fills this part of the receive buffer: else the other host could wait for a
#: window, and this one for data.
_PART_OF_BUFFER = 8


class Stranger(Exception):
    """The other end is no rank of this run."""


class Handshake:
    """The beginning of a connection.

    ``over(why)``: called at its end; ``None``: it has become a connection. ``link``: the :class:`.Link` to the rank that is dialed; ``None``: another process
    dials, and ``find(name, rank)`` returns the link to ``rank`` of the channel of that name, or ``None``.
    """

    def __init__(
        self,
        host: Any,
        made: socket.socket,
        over: Callable[[str | None], None],
        link: Any = None,
        find: Callable[[bytes, int], Any] = lambda name, rank: None,
    ) -> None:
        self._host, self._socket, self._link = host, made, link
        self._find, self._ends, self._over = find, over, False
        self._random = os.urandom(16)
        self._heard = b""
        made.setblocking(False)
        host.watch(made, selectors.EVENT_READ if link is None else selectors.EVENT_WRITE, self._act)
        host.later(HANDSHAKE_SECONDS, lambda: self.fail(f"no answer in {HANDSHAKE_SECONDS:g} s"))

    def fail(self, why: str) -> None:
        if not self._over:
            self._over = True
            self._host.watch(self._socket, 0, self._act)
            self._socket.close()
            self._ends(why)

    def _act(self, events: int) -> None:
        try:
            if events & selectors.EVENT_WRITE:
                self._call()
            else:
                self._read()
        except (OSError, Stranger) as error:
            self.fail(getattr(error, "strerror", None) or str(error))

    def _call(self) -> None:
        """End dialing: the connection is there, or has failed."""
        error = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))
        secret, rank = self._link.channel.secret, self._link.channel.rank
        proof = secret.derive(b"call", rank.to_bytes(4, "little"), self._random)
        self._socket.send(_CALL.pack(_MAGIC, self._link.channel.id, rank, self._random, proof))
        self._host.watch(self._socket, selectors.EVENT_READ, self._act)

    def _read(self) -> None:
        wanted = _CALL if self._link is None else _REPLY
        came = self._socket.recv(wanted.size - len(self._heard))
        if not came:
            raise Stranger("it closed the connection")
        self._heard += came
        if self._link is None and not _MAGIC.startswith(self._heard[: len(_MAGIC)]):
            raise Stranger("it is no rank")
        if len(self._heard) == wanted.size:
            self._reply() if self._link is None else self._meet()

    def _reply(self) -> None:
        _, name, rank, random, proof = _CALL.unpack(self._heard)
        link = self._find(name, rank)
        if link is None:
            raise Stranger("it calls another channel")
        secret = link.channel.secret
        if not hmac.compare_digest(proof, secret.derive(b"call", rank.to_bytes(4, "little"), random)):
            raise Stranger("it has another secret")
        self._socket.send(_REPLY.pack(self._random, secret.derive(b"reply", random, self._random)))
        self._begin(link, random + self._random, dialed=False)

    def _meet(self) -> None:
        random, proof = _REPLY.unpack(self._heard)
        if not hmac.compare_digest(proof, self._link.channel.secret.derive(b"reply", self._random, random)):
            raise Stranger("it has another secret")
        self._begin(self._link, self._random + random, dialed=True)

    def _begin(self, link: Any, randoms: bytes, dialed: bool) -> None:
        self._over = True
        self._ends(None)
        ends = (b"dialer", b"listener") if dialed else (b"listener", b"dialer")
        ours, theirs = (link.channel.secret.derive(b"key", randoms, end)[:16] for end in ends)
        seal = NoCipher() if link.channel.plain else Cipher(ours, sealing=True)
        open_ = NoCipher() if link.channel.plain else Cipher(theirs, sealing=False)
        Connection(self._host, self._socket, link, seal, open_, dialed)


class Connection:
    """Frames to and from the rank of ``link``, which has it from the first authentic frame on."""

    def __init__(
        self,
        host: Any,
        made: socket.socket,
        link: Any,
        seal: Cipher | NoCipher,
        open_: Cipher | NoCipher,
        dialed: bool,
    ) -> None:
        self._host, self._socket, self.link = host, made, link
        self._writer, self._reader = Writer(seal, link.channel.most), Reader(open_, link.channel.most)
        self._out = memoryview(b"")
        self._held: tuple[Header, memoryview] | None = None
        self._unsent = UNSENT_BYTES
        self.known = self.closed = self.malformed = self._blocked = self._tries = False
        host.later(HANDSHAKE_SECONDS, lambda: None if self.known else self.close("it proves nothing"))
        if dialed:
            self.say(ASK)
        if not self.closed:
            self._watch()

    def _watch(self) -> None:
        reads = 0 if self._held is not None else selectors.EVENT_READ
        writes = selectors.EVENT_WRITE if self._out or (self.known and self.link.wants_to_send()) else 0
        self._host.watch(self._socket, reads | writes, self._act)

    def wake(self) -> None:
        """Read again what was held back, and write what is new."""
        if not self.closed:
            self._act(selectors.EVENT_WRITE | (selectors.EVENT_READ if self._held is not None else 0))

    def read(self) -> None:
        """Take what the kernel has."""
        if not self.closed:
            self._act(selectors.EVENT_READ)

    def say(self, kind: int) -> None:
        """Send a frame without payload, unless another is under way."""
        if not self.closed and not self._out:
            self._out = self._writer.frame(Header(kind))
            self._act(selectors.EVENT_WRITE)

    def _act(self, events: int) -> None:
        try:
            if events & selectors.EVENT_READ:
                self._read()
            if events & selectors.EVENT_WRITE and not self.closed:
                with suppress(BlockingIOError):
                    self._write()
        except MalformedFrame as error:
            self.malformed = True
            self.close(str(error))
        except OSError as error:
            self.close(error.strerror or str(error))
        if not self.closed:
            self._watch()

    def _read(self) -> None:
        self._take()
        for _ in range(_READS):
            if self._held is not None or self.closed:
                return  # what comes before it is asked for has no room: the sender waits
            room = self._reader.room()
            try:
                size = self._socket.recv_into(room)
            except BlockingIOError:
                break
            if not size:
                raise OSError(0, "it closed the connection")
            self._reader.came(size)
            self._take()
            if size < len(room):  # there is no more
                break
        if self._held is None and not self.closed:
            # A part of a frame is of no use: the kernel need not say that it has come.
            most = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) // _PART_OF_BUFFER
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, min(self._reader.needed, most))

    def _take(self) -> None:
        while not self.closed and (frame := self._held or self._reader.next()) is not None:
            if not self.known:
                self.known = True
                self.link.connected(self)
            self._held = None if self.link.take(*frame) else frame
            if self._held is not None:
                return
            if frame[0].kind == ASK:
                self.say(LIVE)

    def _write(self) -> None:
        self._follow_window()
        for _ in range(_WRITES):
            if not self._out and self.known:
                self._out = self.link.next_frame(self._writer)
            if not self._out:
                return
            sent = self._socket.send(self._out)
            if self._blocked and sent:
                self.link.silent = 0.0  # the other host takes what is sent
            self._out = self._out[sent:]
            self._blocked = bool(self._out)
            if self._out:  # the kernel has enough
                if not self._tries:
                    self._tries = True
                    self._host.later(_AGAIN, self._try)
                return

    def _try(self) -> None:
        """Write again, unless the other host takes nothing."""
        self._tries = False
        if self._blocked and not self.link.silent:
            self.wake()

    def _follow_window(self) -> None:
        """Let the kernel keep as much unsent as its congestion window.

        With less its controller runs dry while this thread waits for a processor, and takes the link for slower than it is.
        With more an old exchange would delay the next one by more than a window.
        """
        window = max(self.measured()[0], UNSENT_BYTES)
        if not self._unsent / 1.25 <= window <= 1.25 * self._unsent:
            self._unsent = window
            self._socket.setsockopt(socket.IPPROTO_TCP, NOTSENT_LOWAT, window)

    def measured(self) -> tuple[int, float, float, int | None]:
        """Return bytes of the congestion window, bytes per second, seconds of the least round trip, and packets that came behind a missing one.

        All are as the kernel has them; kernels before 5.4 lack the last. Raise OSError once it is closed. May be called on any thread.
        """
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 228)
        segment, segments = struct.unpack_from("=I", info, 16)[0], struct.unpack_from("=I", info, 80)[0]
        [microseconds], [rate] = struct.unpack_from("=I", info, 148), struct.unpack_from("=Q", info, 160)
        behind = struct.unpack_from("=I", info, 224)[0] if len(info) >= 228 else None
        return segment * segments, float(rate), microseconds / 1e6, behind

    @property
    def unacknowledged(self) -> bool:
        """Whether the other host has not acknowledged all frames. May be called on any thread."""
        try:
            return bool(self._out) or fcntl.ioctl(self._socket, termios.TIOCOUTQ, bytes(4)) != bytes(4)
        except (OSError, ValueError):
            return False  # it is closed

    def close(self, why: str) -> None:
        """Close the connection; the link dials again, or waits to be dialed."""
        if not self.closed:
            self.closed = True
            self._host.watch(self._socket, 0, self._act)
            with suppress(OSError):  # a forked process may still have it open
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
            self.link.broken(self, why)
