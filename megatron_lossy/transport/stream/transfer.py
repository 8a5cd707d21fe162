"""One exchange of a channel: what has come, what has left, and when its deadline is."""

from __future__ import annotations

import ctypes
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from threading import Condition

import numpy as np

from ..settings import Settings
from ..staging import Message
from .link import Link, Outgoing, Shape

#: Seconds between two looks at the deadline, and at the ranks that are waited for.
_SLICE = 0.2
#: ``auto``: the times of so many parts of an exchange are kept, of so many exchanges, and of how many at least.
_PARTS, _HISTORY, _ENOUGH = 32, 64, 10
#: ``auto`` is by so much longer than the time in which the wanted share came. Without it a link that loses nothing would lose the share
#: that is not wanted: some exchange of the last 64 was always the slowest.
_FACTOR, _SECONDS = 1.05, 0.002

Key = tuple[int, int]
Pointers = Sequence[int | None]


class Deadline:
    """``--udp-deadline`` of a channel."""

    def __init__(self, settings: Settings) -> None:
        self.setting, self._share = settings.deadline, settings.arrive
        self._took: dict[Key, deque[np.ndarray]] = defaultdict(lambda: deque(maxlen=_HISTORY))
        self._allowed: dict[Key, float] = {}

    def took(self, key: Key, seconds: np.ndarray) -> None:
        """Note the times of the parts of an exchange of a phase and bucket."""
        took = self._took[key]
        took.append(seconds)
        if self.setting == "auto" and len(took) >= _ENOUGH:
            self._allowed[key] = _FACTOR * float(np.quantile(np.concatenate(took), self._share)) + _SECONDS

    def allowed(self, key: Key) -> float:
        """Return seconds that an exchange may take."""
        return self.setting if isinstance(self.setting, float) else self._allowed.get(key, math.inf)

    @property
    def waits_for_living(self) -> bool:
        """Whether the time of an exchange begins when all ranks that live have begun it, and not when this one has."""
        return not isinstance(self.setting, float)


class Transfer(Message):
    """One exchange, from its :meth:`.Channel.post` on. ``lock``: that of its channel. ``links``: to the other ranks."""

    def __init__(
        self,
        lock: Condition,
        deadline: Deadline,
        links: Mapping[int, Link],
        key: Key,
        number: int,
        shape: Shape,
        destinations: Pointers,
    ) -> None:
        self.number, self.shape = number, shape
        #: Owns the memory that is read and written.
        self.keep: object = None
        self._lock, self._deadline, self._links, self._key = lock, deadline, links, key
        self.arrived = np.zeros((len(destinations), shape.units), np.bool_)
        self._into = {
            rank: memoryview((ctypes.c_char * shape.shard).from_address(address)).cast("B")
            for rank, address in enumerate(destinations)
            if address is not None
        }
        #: By source: units that may still come, and by destination: what may still leave.
        self._left = {rank: 0 if links[rank].left else shape.units for rank in self._into}
        self.leaving: dict[int, Outgoing] = {}
        self._all = self._missing = len(self._into) * shape.units
        self._posted = time.monotonic()
        self._begun: dict[int, float] = {}
        self._times: list[float] = []  # when each part of all units had come
        #: When nothing was taken any more; ``None``: units may come.
        self.ended: float | None = None
        self.over = False

    # --- called with the channel's lock ------------------------------------------------------------------------------

    def came(self, source: int, first: int, count: int, payload: memoryview) -> None:
        """Take units of ``source``."""
        into = self._into.get(source)
        if into is None:
            return
        begin, now = first * self.shape.unit, time.monotonic()
        into[begin : begin + len(payload)] = payload
        row = self.arrived[source, first : first + count]
        new = count - int(np.count_nonzero(row))
        row[:] = True
        self._left[source] = max(self._left[source] - new, 0)
        self._missing -= new
        parts = (self._all - self._missing) * _PARTS // self._all
        self._times += [now] * (parts - len(self._times))
        if self._begun.setdefault(source, now) == now or not self._left[source]:
            self._lock.notify_all()

    def begin(self, source: int) -> None:
        """Note that ``source`` has begun: its time runs."""
        self._begun.setdefault(source, time.monotonic())

    def finished(self, source: int) -> None:
        """Note that nothing more comes from ``source``."""
        if self._left.get(source):
            self._left[source] = 0
            self._lock.notify_all()

    def missed(self, source: int, units: int) -> None:
        """Note that ``units`` of ``source`` came, and were not kept."""
        self._left[source] = max(self._left.get(source, 0) - units, 0)

    def awaits(self, source: int) -> bool:
        """Return whether units of ``source`` may come."""
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
        start, lost = self._start, {source: int(np.count_nonzero(~self.arrived[source])) for source in self._into}
        if any(units and self._links[source].lives for source, units in lost.items()):
            # It was cut: later ones get more time.
            took = min(self.ended - start, self._deadline.allowed(self._key))
            self._times += [start + 2 * took] * (_PARTS - len(self._times))
        if self._into and len(self._times) == _PARTS:
            self._deadline.took(self._key, np.maximum(np.array(self._times) - start, 0.0))
        for source, units in lost.items():
            self._links[source].counters["lost"] += units
        self._into = {}

    @property
    def _start(self) -> float:
        return max(self._posted, *self._begun.values()) if self._begun else self._posted

    def _until(self) -> float:
        """Return the time of the deadline, as far as that is known."""
        allowed = self._deadline.allowed(self._key)
        if not self._deadline.waits_for_living:
            return self._posted + allowed
        return math.inf if any(rank not in self._begun for rank in self._coming()) else self._start + allowed

    def _coming(self) -> list[int]:
        """Return the ranks that live and of which more may come."""
        return [rank for rank in self._left if self.awaits(rank) and self._links[rank].lives]

    def _going(self) -> list[int]:
        """Return the ranks that live and that more has to leave for."""
        links = self._links
        return [] if self.over else [rank for rank, one in self.leaving.items() if not one.sent and links[rank].lives]

    def _wait(self, pending: Callable[[], list[int]], timeout: float | None) -> None:
        """Wait until nobody is ``pending``, or the deadline passes. Raise TimeoutError."""
        last = math.inf if timeout is None else time.monotonic() + timeout
        while ranks := pending():
            now = time.monotonic()
            rest = self._until() - now
            if rest <= 0:
                return
            if now >= last:
                raise TimeoutError(f"waits for {self._links[ranks[0]].called}")
            self._lock.wait(min(rest, last - now, _SLICE))

    # --- called without it -------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> np.ndarray:
        """Return bool[N, units]: the units that arrived. Raise TimeoutError after ``timeout`` seconds."""
        with self._lock:
            self._wait(self._coming, timeout)
            self._end_taking()
            return self.arrived

    def sent(self, timeout: float | None = None) -> None:
        """Wait until the kernel has all data; those that it lacks at the deadline are dropped. Raise TimeoutError."""
        with self._lock:
            self._wait(self._going, timeout)
            self.end()

    def all_sent(self) -> bool:
        """Return whether nothing waits to be handed to the kernel."""
        with self._lock:
            return not self._going()

    def missing(self) -> int | None:
        """Return a rank of which more is to come; ``None``: there is none."""
        with self._lock:
            return next(iter(self._coming()), None)
