"""The agreement of islands to stop after one iteration, the same for all, although messages are lost.

A rank that is told to stop puts the signal into every message of every exchange, and so does every rank that hears it.
The first ranks of the islands then meet, each on a thread, while training goes on. They meet once to be sure that all
know, and once for the latest iteration that any of them has begun: after that one all of them stop. No island waits for
another that has not heard, or stands still. The last answer needs only threads, and so takes no longer than a message.
Islands that reach the end of the run take part as well.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from .world import Meeting

#: A number beside those of signals: the island is at the end of its run.
_OVER = 1 << 14
#: Others may hear only with their next exchange, or end much later. A dead island is noticed in other ways.
_PATIENCE = timedelta(days=365)


class Stopping:
    """The knowledge of one rank about stopping. ``meeting``: of the first ranks of all islands, on one of these.

    Iterations are counted from 1, beginning where this process began; all islands begin alike.
    """

    def __init__(self, meeting: Meeting | None = None) -> None:
        #: The signal to stop, as far as it is known here; 0: none. It crosses in messages.
        self.number = 0
        self._changed = threading.Condition()
        self._begun = 0
        self._asked = 0  # questions still to be put, by islands that exchange nothing
        self._over = False
        self._most: int | None = None  # iterations that may begin before the last one is known
        self._last: int | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if meeting is not None:
            self._thread = threading.Thread(target=self._run, args=(meeting,), name="megatron-lossy-stop", daemon=True)
            self._thread.start()

    def hear(self, number: int) -> None:
        """Note that ``number`` is a signal to stop. May be called on any thread."""
        with self._changed:
            self.number = max(self.number, number)
            self._changed.notify_all()

    def ask(self) -> None:
        """Ask the others whether they stop, without waiting. All islands ask equally often."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def begin(self) -> tuple[int, int]:
        """Begin the next iteration. Returns the signal and the last iteration, each 0 if not known.

        Waits if the iteration could be later than the last one. Raises errors between islands.
        """
        with self._changed:
            self._begun += 1
            while self._most is not None and self._begun > self._most and self._last is None and self._error is None:
                self._changed.wait()
            self._check()
            return self.number, self._last or 0

    def leave(self) -> None:
        """Wait, after the last iteration, until all islands are there: they may still need data from this one."""
        if self._thread is not None:
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self._thread.join()
            self._check()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self, meeting: Meeting) -> None:
        try:
            self._agree(meeting)
            with self._changed:
                self._changed.wait_for(lambda: self._over)
            meeting.largest(0, _PATIENCE)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _agree(self, meeting: Meeting) -> None:
        known = 0
        while not known:
            with self._changed:
                self._changed.wait_for(lambda: self.number or self._over or self._asked)
                self._asked -= 1
                known = self.number | (_OVER if self._over else 0)
            known = meeting.largest(known, _PATIENCE)
        with self._changed:
            self.number = max(self.number, known % _OVER)
            self._most = self._begun
            mine = self._begun if self._over else self._begun + 1  # the next one begins when all of its ranks can know
        last = meeting.largest(mine, _PATIENCE)
        with self._changed:
            self._last = last
            self._changed.notify_all()
