"""Messages on their way: patience with a rank that lives, and a limit for what waits to leave."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any


class PeerLost(RuntimeError):
    """A rank is gone: its process, or the way to it. No exchange of the channel will complete any more."""


def patiently(wait: Callable[[float], Any], seconds: float) -> Any:
    """Call ``wait(seconds)``. Raise :class:`PeerLost` if that was too short: a live process has sent nothing."""
    began = time.monotonic()
    try:
        return wait(seconds)
    except (TimeoutError, FutureTimeout) as error:
        raise PeerLost(f"{error}: nothing for {time.monotonic() - began:.0f} s") from None


class Departures:
    """Messages that are being sent, oldest first. ``memory``: bytes that may wait. ``patience``: seconds for each."""

    def __init__(self, memory: int, patience: float) -> None:
        self._memory = memory
        self._patience = patience
        self._messages: deque[tuple[Any, int]] = deque()

    def add(self, sending: Any, size: int) -> None:
        self._messages.append((sending, size))

    @property
    def full(self) -> bool:
        """Whether too many bytes wait to leave."""
        while self._messages and self._messages[0][0].all_sent():
            self._messages.popleft()
        return sum(size for _, size in self._messages) > self._memory

    def wait(self) -> None:
        """Wait until the oldest message has left. Raise :class:`PeerLost`."""
        patiently(self._messages.popleft()[0].sent, self._patience)

    def forget(self) -> None:
        """Keep no message any more: the channel is closed."""
        self._messages.clear()
