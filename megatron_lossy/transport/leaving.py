"""Messages on their way: patience with a rank that lives, and a limit for what waits to leave."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any

import numpy as np


class PeerLost(RuntimeError):
    """A rank is gone: its process, or the way to it. No exchange of the channel will complete any more."""


class Message(ABC):
    """An exchange of a channel, whatever carries it. ``keep``: owns the memory that is read and written.

    ``arrived`` bool[N, units]: the units that arrived, after :meth:`wait`.
    """

    keep: object
    arrived: np.ndarray | None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> np.ndarray:
        """bool[N, units]: the units that arrived. Raises :class:`PeerLost`, or TimeoutError after ``timeout`` seconds."""

    @abstractmethod
    def sent(self, timeout: float | None = None) -> None:
        """Wait until nothing is read from the sources any more. Raises as :meth:`wait`."""

    @abstractmethod
    def all_sent(self) -> bool:
        """Whether nothing is read from the sources any more. Raises :class:`PeerLost`."""

    def finish(self, seconds: float) -> None:
        """Wait until nothing more arrives, and all is sent. Raises :class:`PeerLost`, also if a live rank sends nothing for ``seconds``."""
        until = time.monotonic() + seconds
        try:
            self.wait(seconds)
            self.sent(max(until - time.monotonic(), 0.0))
        except TimeoutError as error:
            raise PeerLost(f"{error}: nothing for {seconds:g} s") from None


def patiently(wait: Callable[[float], Any], seconds: float) -> Any:
    """``wait(seconds)``. Raises :class:`PeerLost` if that was too short: a live process has sent nothing."""
    began = time.monotonic()
    try:
        return wait(seconds)
    except (TimeoutError, FutureTimeout) as error:
        raise PeerLost(f"{error}: nothing for {time.monotonic() - began:.0f} s") from None


class Leaving:
    """Messages that are being sent, oldest first. ``memory``: bytes that may wait. ``patience``: seconds for each."""

    def __init__(self, memory: int, patience: float) -> None:
        self._memory = memory
        self._patience = patience
        self._messages: deque[tuple[Message, int]] = deque()

    def add(self, sending: Message, size: int) -> None:
        """Keep a message of ``size`` bytes until it has left."""
        self._messages.append((sending, size))

    @property
    def full(self) -> bool:
        """Whether too many bytes wait to leave."""
        while self._messages and self._messages[0][0].all_sent():
            self._messages.popleft()
        return sum(size for _, size in self._messages) > self._memory

    def wait(self) -> None:
        """Wait until the oldest message has left. Raises :class:`PeerLost`."""
        patiently(self._messages.popleft()[0].sent, self._patience)

    def forget(self) -> None:
        """Keep no message any more: the channel is closed."""
        self._messages.clear()
