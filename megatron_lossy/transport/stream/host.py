"""The streams of this process: one thread that waits for all connections, and the port that they come to. All channels share both."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from ...base.errors import refuse
from ..address import resolve
from ..forks import close_in_children, in_children
from ..network import choose_congestion
from ..settings import Settings
from ..udp.session import Opening
from .channel import Channel
from .connection import NOTSENT_LOWAT, UNSENT_BYTES, Handshake
from .link import Link

logger = logging.getLogger(__name__)

#: Connections that have proved nothing yet. More are refused: they take files of this process.
_HANDSHAKES = 256
#: Seconds without traffic after which the kernel looks whether a connection is there: firewalls forget idle ones.
_KEEP_ALIVE = 30
#: Seconds without new connections, if the process has no file for them.
_PAUSE = 0.1


class Host:
    """One thread, one listening socket, and the channels on them. ``local_rank`` is added to the port, unless that is 0.

    Raises :class:`UsageError` for a port that is taken, and for a congestion control that the kernel does not allow.
    """

    def __init__(self, settings: Settings, address: str, local_rank: int = 0) -> None:
        self.settings, self.address = settings, address
        port = settings.port and settings.port + local_rank
        family, bound = resolve(address, port)
        self._listener = self.new_socket(family)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(bound)
            self._listener.listen(1024)
        except OSError as error:
            self._listener.close()
            raise refuse("--udp-port", port, f"{error.strerror} on {address}") from None
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        #: Those that are open, by the name that handshakes call them.
        self.channels: dict[bytes, Channel] = {}
        self._shaking = 0
        #: Connections of others that came to nothing.
        self.refused = 0
        self.closed = False
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, lambda _: os.eventfd_read(self._bell))
        self._asked: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-stream", daemon=True)
        self._thread.start()
        self.ask(self._listen)
        in_children(self, Host.forked)

    def new_socket(self, family: int) -> socket.socket:
        """Return a socket with the options of all connections. Raise :class:`UsageError` for a refused algorithm."""
        made = close_in_children(socket.socket(family, socket.SOCK_STREAM))
        choose_congestion(made, self.settings.congestion)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (NOTSENT_LOWAT, UNSENT_BYTES),
            (socket.TCP_KEEPIDLE, _KEEP_ALIVE),
            # After so long the kernel ends a connection whose data nobody acknowledges.
            (socket.TCP_USER_TIMEOUT, int(self.settings.peer_timeout * 1000)),
        ):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        return made

    def open(self, *arguments: Any, **options: Any) -> Channel:
        """Open a channel, a collective call of its ranks. The arguments are those of :class:`.Opening`."""
        return Channel(self, Opening(*arguments, **options))

    def counters(self) -> dict[str, int]:
        return {"strangers": self.refused}

    def ask(self, act: Callable[[], None]) -> None:
        self._asked.append(act)
        os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        if self.closed:
            return
        for channel in list(self.channels.values()):
            channel.close()
        self.closed = True
        self.ask(self._ends.set)
        self._thread.join()
        self._selector.close()
        self._listener.close()
        os.close(self._bell)

    def forked(self) -> None:
        """Close the selector in a child process, which has no thread. The sockets are closed by themselves."""
        self.closed = True
        self._selector.close()

    # --- on the thread ---------------------------------------------------------------------------------------------

    def later(self, seconds: float, act: Callable[[], None]) -> None:
        """Call ``act`` on the thread after so many seconds."""
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), act))

    def watch(self, file: Any, events: int, act: Callable[[int], None]) -> None:
        """Call ``act`` with the events of ``file`` that are there. No ``events``: not any more."""
        known = self._selector.get_map().get(file.fileno())
        if not events:
            if known is not None:
                self._selector.unregister(file)
        elif known is None:
            self._selector.register(file, events, act)
        elif known.events != events or known.data != act:
            self._selector.modify(file, events, act)

    def _run(self) -> None:
        while not self._ends.is_set():
            wait = max(self._timers[0][0] - time.monotonic(), 0.0) if self._timers else None
            for key, events in self._selector.select(wait):
                self._do(partial(key.data, events))
            while self._asked:
                self._do(self._asked.popleft())
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._do(heapq.heappop(self._timers)[2])

    def _do(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # a mistake of one connection must not end those of all others
            logger.exception("stream: a connection")

    def _listen(self) -> None:
        self.watch(self._listener, selectors.EVENT_READ, self._accept)

    def _accept(self, _: int) -> None:
        try:
            made = close_in_children(self._listener.accept()[0])
        except OSError as error:
            logger.debug("stream: %s", error)
            self.watch(self._listener, 0, self._accept)
            self.later(_PAUSE, self._listen)
            return
        if self._shaking >= _HANDSHAKES:
            self.refused += 1
            made.close()
            return
        self._shaking += 1

        def over(why: str | None) -> None:
            self._shaking -= 1
            self.refused += why is not None

        Handshake(self, made, over, find=self._find)

    def _find(self, name: bytes, rank: int) -> Link | None:
        channel = self.channels.get(name)
        return None if channel is None else channel.links.get(rank)
