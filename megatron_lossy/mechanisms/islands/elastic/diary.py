"""The diary of one island: the epochs that it exchanged in, what happened to it, and what was lost whole.

Its lines are those of :func:`..epochs.line`, in the folder of the island. ``exchange``: the next one; ``t``: iterations of the run before
it. ``members``, ``roles`` and ``id`` are of the epoch that it is made in, and empty and null if this island is in none. ``lag`` is
that of this ``island`` alone. ``lost``: exchanges of which nothing arrived here since the last line.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

from ....run.monitor.observer import Observer
from ....run.monitor.window import Window
from ..epochs import Epoch, EpochLog, line

#: Exchanges whose messages make the share of lost ones.
_RECENT = 20


class Diary(Observer):
    """The diary of the island ``slot``. ``folder``: of the delivery log, of the rank that writes it; ``None``: only metrics are kept."""

    def __init__(self, slot: int, folder: str | None = None) -> None:
        self._slot = slot
        self._log = None if folder is None else EpochLog(folder, keeps=True)
        self._window = Window(["exchanges", "members", "senders", "lost"])
        self._changed = threading.Lock()
        self._events: list[dict[str, Any]] = []
        #: The latest event.
        self.latest = ""
        self._messages: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._lost: set[int] = set()  # since the last line
        self._counted: set[int] = set()  # of the lost ones, in the window
        self._written: tuple[str | None, int] | None = None
        self._next = self._made = self._lag = 0
        self._epoch: Epoch | None = None

    def check(self) -> None:
        """Raise :class:`UsageError` if the folder has the lines of another run."""
        if self._log is not None:
            self._log.check()

    # --- what happens, also on threads -----------------------------------------------------------------------------

    def note(self, event: str, **more: Any) -> None:
        """``event`` happened; ``more`` about it, for JSON."""
        with self._changed:
            self._events.append({"event": event, **more})
            self.latest = event

    def ended(self, exchange: int, expected: int, came: float) -> None:
        """Of ``exchange`` of a shard ``came`` messages of ``expected``."""
        with self._changed:
            if expected:
                self._messages.append((expected, came))
            if came or not expected:
                return
            self._lost.add(exchange)
            if exchange not in self._counted:  # of another shard
                self._counted.add(exchange)
                self._window.add(lost=1)

    @property
    def lost(self) -> float:
        """The share of the messages of others that did not come lately."""
        with self._changed:
            expected = sum(number for number, _ in self._messages)
            return 1 - sum(came for _, came in self._messages) / expected if expected else 0.0

    # --- in the order of iterations --------------------------------------------------------------------------------

    def begin(self, exchange: int, made: int, epoch: Epoch | None, lag: int) -> None:
        """``exchange`` begins after ``made`` iterations of the run, in ``epoch``, or in none. ``lag``: of this island."""
        with self._changed:
            there = ([], []) if epoch is None else (epoch.slots, epoch.senders)
            self._window.add(exchanges=1, members=len(there[0]), senders=len(there[1]))
            self._counted = {one for one in self._counted if one > exchange - 1000}
        self._next, self._made, self._epoch, self._lag = exchange, made, epoch, lag
        key = (None, -1) if epoch is None else epoch.key
        if key != self._written or self._events:
            self._written = key
            self._write()

    def _write(self) -> None:
        with self._changed:
            events, self._events = self._events, []
            lost, self._lost = sorted(self._lost), set()
        if self._log is None:
            return
        more = {"island": self._slot, "lost": lost}
        self._log.add(line(self._next, self._made, self._epoch, self._lag, events, **more))

    def restart(self, iteration: int) -> None:
        if self._log is not None:
            self._log.restart(iteration)

    def metrics(self) -> dict[str, float]:
        with self._changed:
            total = self._window.close()
        if not total["exchanges"]:
            return {}
        names = {"members": "island members", "senders": "island senders", "lost": "exchanges lost"}
        return {name: total[column] / total["exchanges"] for column, name in names.items()}

    def finish(self) -> None:
        """This island leaves, once nothing is under way any more."""
        if self._written is not None:
            self.note("leaves")
            self._write()
            self._written = None
