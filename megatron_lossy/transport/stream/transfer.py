"""One exchange of a channel: what has come, what has left, and when its deadline is."""

from __future__ import annotations

import ctypes
import math
import time
from collections.abc import Callable, Mapping, Sequence
from threading import Condition
from typing import Any, Literal

import numpy as np

from ..staging import Message
from .deadline import Looks
from .link import Link, OutgoingMessage, Shape

#: Seconds between two looks at the ranks that are waited for.
_SLICE = 0.2

Key = tuple[int, int]
Pointers = Sequence[int | None]


class Transfer(Message):
    """One exchange of ``channel``, from its :meth:`.Channel.post` on. ``limit``: seconds that it may take, "auto", or ``None``."""

    def __init__(
        self,
        channel: Any,
        key: Key,
        number: int,
        shape: Shape,
        destinations: Pointers,
        limit: float | Literal["auto"] | None,
    ) -> None:
        self.number, self.shape = number, shape
        #: Owns the memory that is read and written.
        self.keep: object = None
        self._lock: Condition = channel.lock
        self._links: Mapping[int, Link] = channel.links
        self._ask, self._give_up = channel.host.ask, channel.give_up
        self._key = key
        self._looks = Looks(channel.paces[key]) if limit == "auto" else None
        self._asked = False  # for a look
        self.arrived = np.zeros((len(destinations), shape.units), np.bool_)
        self._into = {
            rank: memoryview((ctypes.c_char * shape.shard).from_address(address)).cast("B")
            for rank, address in enumerate(destinations)
            if address is not None
        }
        #: By source: units that may still come, and by destination: what may still leave.
        self._left = {rank: 0 if self._links[rank].left else shape.units for rank in self._into}
        self.leaving: dict[int, OutgoingMessage] = {}
        self._unwanted: set[int] = set()  # ranks that take no more
        self._all = self._missing = sum(self._left.values())
        self._posted = self._latest = time.monotonic()  # the latest: when new units came
        self._last = self._posted + (limit if isinstance(limit, float) else math.inf)
        #: By source, when its first data left.
        self._begun: dict[int, float] = {}
        self._cut = False  # whether a source was done without because the exchange was late
        #: When nothing was taken any more; ``None``: units may come.
        self.ended: float | None = None
        self.over = False

    # --- called with the channel's lock ------------------------------------------------------------------------------

    def came(self, source: int, first: int, count: int, payload: memoryview) -> None:
        into = self._into.get(source)
        if into is None:
            return
        begin = first * self.shape.unit
        into[begin : begin + len(payload)] = payload
        row = self.arrived[source, first : first + count]
        new = count - int(np.count_nonzero(row))
        row[:] = True
        self._left[source] = max(self._left[source] - new, 0)
        self._missing -= new
        self._latest = time.monotonic()
        if source not in self._begun or not self._left[source]:
            self.begin(source)
            self._lock.notify_all()

    def begin(self, source: int) -> None:
        """Note that ``source`` has begun: its time runs."""
        self._begun.setdefault(source, time.monotonic() - self._links[source].round_trip / 2)

    def finished(self, source: int) -> None:
        if self._left.get(source):
            self._left[source] = 0
            self._lock.notify_all()

    def missed(self, source: int, units: int) -> None:
        """Note that ``units`` of ``source`` came, and were not kept."""
        self._left[source] = max(self._left.get(source, 0) - units, 0)

    def drop(self, rank: int) -> None:
        """Note that ``rank`` takes no more of this exchange."""
        self._unwanted.add(rank)
        if rank in self.leaving:
            self.leaving[rank].dropped = True
            self._lock.notify_all()

    def leave(self, rank: int, message: OutgoingMessage) -> None:
        self.leaving[rank] = message
        message.dropped = rank in self._unwanted

    def awaits(self, source: int) -> bool:
        return self.ended is None and bool(self._left.get(source))

    def end(self) -> None:
        """End the exchange: nothing is read or written any more."""
        if not self.over:
            self._end_taking()
            self.over, self.keep = True, None
            for message in self.leaving.values():
                message.dropped = True
            self._lock.notify_all()

    def _end_taking(self) -> None:
        if self.ended is not None:
            return
        self.ended = time.monotonic()
        for source in self._left:
            self._do_without(source)
        if self._looks is not None and self._all and (self._cut or not self._missing):
            self._looks.pace.note(max((self.ended if self._missing else self._latest) - self._start, 0.0))
        for source in self._into:
            self._links[source].counters["lost"] += int(np.count_nonzero(~self.arrived[source]))
        self._into = {}

    def _do_without(self, source: int) -> None:
        if self._left[source]:
            self._left[source] = 0
            self._give_up(self, self._key, source)

    def look(self) -> None:
        """Do without the sources that stand still, if packets are missing on the way from them. On the host's thread."""
        for source, left in self._left.items():
            if left:  # what the kernel has is not late, whatever this process was waiting for
                self._links[source].read()
        with self._lock:
            self._asked, now = False, time.monotonic()
            if self._looks is None or now < self._until():
                return
            misses = {source: self._left[source] / self.shape.units for source in self._coming()}
            for source in self._looks.standing(self._start, now, misses):
                if self._links[source].loses and self._looks.pace.lose(self._left[source] / self._all):
                    self._cut = True
                    self._do_without(source)
            self._lock.notify_all()

    @property
    def _start(self) -> float:
        return max(self._posted, *self._begun.values()) if self._begun else self._posted

    def _until(self) -> float:
        """Return the time of the deadline, or of the next look, as far as that is known."""
        if self._looks is None:
            return self._last
        if self.ended is not None or any(rank not in self._begun for rank in self._coming()):
            return math.inf
        return self._looks.due(self._start)

    def _coming(self) -> list[int]:
        """Return the ranks that live and of which more may come."""
        return [rank for rank in self._left if self.awaits(rank) and self._links[rank].lives]

    def _going(self) -> list[int]:
        """Return the ranks that live, and wait for more."""
        waiting = {} if self.over else self.leaving
        return [
            rank
            for rank, message in waiting.items()
            if not (message.sent or message.dropped) and self._links[rank].lives
        ]

    def _wait(self, pending: Callable[[], list[int]], timeout: float | None) -> None:
        """Wait until nobody is ``pending``, or until the deadline. Raise TimeoutError."""
        last = math.inf if timeout is None else time.monotonic() + timeout
        while ranks := pending():
            now = time.monotonic()
            rest = self._until() - now
            if rest <= 0 and self._looks is None:
                return
            if rest <= 0:
                if not self._asked:
                    self._asked = True
                    self._ask(self.look)
                rest = _SLICE
            if now >= last:
                raise TimeoutError(f"waits for {self._links[ranks[0]].called}")
            self._lock.wait(min(rest, last - now, _SLICE))

    # --- called without it -------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> np.ndarray:
        with self._lock:
            self._wait(self._coming, timeout)
            self._end_taking()
            return self.arrived

    def sent(self, timeout: float | None = None) -> None:
        """Wait until the kernel has all data that the other ranks wait for; the others are dropped. Raise TimeoutError."""
        with self._lock:
            self._wait(self._going, timeout)
            self.end()

    def all_sent(self) -> bool:
        with self._lock:
            return not self._going()
