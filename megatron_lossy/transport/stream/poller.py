"""The thread of this process that waits for all its connections, and the port that they come to."""

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
from ..network import choose_congestion

logger = logging.getLogger(__name__)

#: Bytes that the kernel keeps at least besides those that are on the way: what is dropped when an exchange is over is not among them.
UNSENT_BYTES = 2**17
NOTSENT_LOWAT = 25  # of Linux; Python's socket lacks it before 3.12
#: Seconds without traffic after which the kernel looks whether a connection is there: firewalls forget idle ones.
_KEEP_ALIVE = 30
#: Seconds without new connections, if the process has no file for them.
_PAUSE = 0.1


class Poller:
    """One thread and one listening socket.

    ``port``: 0 takes a free one. ``congestion``: the kernel's algorithm for all connections, or its default. ``timeout``: seconds
    after which the kernel ends a connection whose data nobody acknowledges. Raises :class:`UsageError` for a port that is taken, and
    for an algorithm that the kernel does not allow.
    """

    def __init__(self, address: str, port: int, congestion: str | None, timeout: float) -> None:
        self._congestion, self._timeout = congestion, timeout
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
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._bell, selectors.EVENT_READ, lambda _: os.eventfd_read(self._bell))
        self._asked: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-stream", daemon=True)
        self._thread.start()

    def new_socket(self, family: int) -> socket.socket:
        """A socket with the options of all connections. Raises :class:`UsageError` for an algorithm the kernel does not allow."""
        made = socket.socket(family, socket.SOCK_STREAM)
        choose_congestion(made, self._congestion)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            (socket.TCP_NODELAY, 1),
            (NOTSENT_LOWAT, UNSENT_BYTES),
            (socket.TCP_KEEPIDLE, _KEEP_ALIVE),
            (socket.TCP_USER_TIMEOUT, int(self._timeout * 1000)),
        ):
            made.setsockopt(socket.IPPROTO_TCP, option, value)
        return made

    def listen(self, accepted: Callable[[socket.socket], None]) -> None:
        """Call ``accepted``, on the thread, with each connection that comes."""

        def accept(_: int) -> None:
            try:
                accepted(self._listener.accept()[0])
            except OSError as error:
                logger.debug("stream: %s", error)
                self.watch(self._listener, 0, accept)
                self.later(_PAUSE, watch)

        watch = partial(self.watch, self._listener, selectors.EVENT_READ, accept)
        self.ask(watch)

    def ask(self, act: Callable[[], None]) -> None:
        """Call ``act`` on the thread, soon."""
        self._asked.append(act)
        os.eventfd_write(self._bell, 1)

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
        while not self._ends:
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

    def close(self) -> None:
        """End the thread, and close the port."""

        def end() -> None:
            self._ends = True

        self.ask(end)
        self._thread.join()
        self._selector.close()
        self._listener.close()
        os.close(self._bell)

    def forked(self) -> None:
        """Close the files of the parent in a child process, which has no thread. Connections stay as they are."""
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, socket.socket):
                os.close(key.fileobj.detach())
        self._selector.close()
