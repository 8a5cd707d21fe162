"""One exchange of a channel of datagrams."""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import Any

import numpy as np

from ..staging import Message
from .library import SECOND

#: Seconds between looks at signals while waiting.
_SLICE = 0.2
#: Complete times of a bucket that are kept.
_HISTORY = 100


class Transfer(Message):
    """One exchange, from its first half on."""

    def __init__(self, channel: Any, key: tuple[int, int, int]) -> None:
        self.key = key
        self.arrived: np.ndarray | None = None
        #: Owns the memory that the engine reads and writes. It is kept for as long as that takes, even without a wait.
        self.keep: object = None
        #: Seconds from the posting to the end.
        self.took: float | None = None
        self._channel = channel
        self._lib = channel._lib
        self._handle: ctypes.c_void_p | None = None
        self._users, self._dropped = 0, False
        self._sending = self._all_sent = False
        self._reports = False  # whether reports are still wanted

    def __str__(self) -> str:
        phase, bucket, step = self.key
        return f"{self._channel.phases[phase]} {step}, bucket {bucket} of {self._channel.name}"

    def _drop(self) -> None:
        """Drop the transfer: the engine will not be asked for it. Called with the channel's lock."""
        self._channel._transfers.pop(self.key, None)
        self._dropped = True
        self._release()

    def _release(self) -> None:
        """Give the handle back, if it was dropped and is not in use. Called with the channel's lock."""
        if self._dropped and not self._users and self._handle is not None:
            self._lib.ml_release(self._handle)
            self._ended()

    def _ended(self) -> None:
        self._handle = self.keep = None

    def _forget(self) -> None:
        """Drop the transfer if it is over, because a later step has begun. Called with the channel's lock."""
        if self._handle is not None and self._sending and not self._all_sent:
            self._all_sent = self._lib.ml_wait(self._handle, 1, 0) == 0
        over = self.arrived is None or self.took is not None
        if self._handle is not None and over and (not self._sending or self._all_sent) and not self._reports:
            self._drop()

    def wait(self, timeout: float | None = None) -> np.ndarray:
        """Return bool[N, units]: arrived units. The own row is true; that of a source without destination is false.

        Waits also until the exchange is posted, but not for the data that this rank sends. Raise :class:`PeerLost`, or
        TimeoutError after ``timeout`` seconds; the engine may then still write.
        """
        if not self._wait(0, timeout):
            raise TimeoutError(f"{self}: {self._missing()} after {timeout:g} s")
        return self.arrived

    def all_sent(self) -> bool:
        return self._wait(1, 0.0)

    def sent(self, timeout: float | None = None) -> None:
        """Wait until the engine reads nothing from the sources any more, and also until ``send`` is called."""
        if not self._wait(1, timeout):
            raise TimeoutError(f"{self}: not all sent after {timeout:g} s")

    def expects_reports(self, wanted: bool = True) -> None:
        """Announce that :meth:`reports` will be called. Call this before the data is sent."""
        self._reports = wanted

    def reports(self) -> np.ndarray | None:
        """Return bool[N, units]: the lost units, in a reported phase; ``None`` while a report is missing.

        Raise :class:`PeerLost`. After :meth:`expects_reports`, call this until it returns the array.
        """
        channel = self._channel
        phase, bucket, _ = self.key
        lost = np.empty((channel.size, channel._units[channel.phases[phase]][bucket]), np.bool_)
        with channel._using(self):
            if not self._reports or self._handle is None:
                raise ValueError(f"{self}: no reports are left")
            result = self._lib.ml_reports(self._handle, lost.ctypes.data)
            if result < 0:
                raise channel.lost()
            if result:
                return None
            with channel._lock:
                self._reports = False
                self._forget()
        return lost

    def _missing(self) -> str:
        channel = self._channel
        with channel._using(self):
            rank = -1 if self._handle is None else self._lib.ml_missing(self._handle)
        if rank < 0:
            return "not posted"
        return f"waits for rank {channel._opening.number(rank)} ({channel.hellos[rank].where})"

    def _wait(self, what: int, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not (self._all_sent if what else self.took is not None):
            rest = _SLICE if until is None else min(max(until - time.monotonic(), 0.0), _SLICE)
            with self._channel._using(self):
                if self._all_sent if what else self.took is not None:
                    break  # another thread has seen it
                if self._handle is None:
                    raise ValueError(f"{self}: its other half never began")
                result = self._lib.ml_wait(self._handle, what, int(rest * SECOND))
                if result < 0:
                    raise self._channel.lost()
                if result == 0:
                    self._note(what)
            if result and until is not None and time.monotonic() >= until:
                return False
        return True

    def _note(self, what: int) -> None:
        """Note that the exchange is over (``what`` 0), or that all is sent (1)."""
        channel = self._channel
        with channel._lock:
            if what:
                self._all_sent = True
            elif self.took is None:
                self.took = self._lib.ml_took(self._handle) / SECOND
                channel._took.setdefault(self.key[:2], deque(maxlen=_HISTORY)).append(self.took)
            if self.took is not None and self._all_sent and not self._reports:
                self._drop()
