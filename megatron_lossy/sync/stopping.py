"""Whether islands stop, and after which iteration: the same for all, though messages are lost and islands stand still.

Who is told to stop says so in every message of every exchange, and so does whoever hears it. The first ranks of the islands
then meet, each on a thread, while training goes on: once to be sure that all know, and once for the latest iteration that
any of them has begun, after which all of them stop. Nobody waits for an island that has not heard; and for this last answer,
which only threads have to give, no longer than it takes to cross. Islands that come to the end of the run take part as well.
"""

from __future__ import annotations

import threading
from datetime import timedelta

from .world import Meeting

#: Beside the numbers of signals: an island that is at the end of its run.
_OVER = 1 << 14
#: Others may hear of it with their next exchange only, or be at their end much later. Who dies is noticed all the same.
_PATIENCE = timedelta(days=365)


class Stopping:
    """What a rank knows of it. ``meeting``: of the first ranks of all islands, for one of these.

    Iterations are counted from 1 and from where this process began, which islands do alike.
    """

    def __init__(self, meeting: Meeting | None = None) -> None:
        #: The signal that somebody was told to stop by, as far as it is known here; 0: none. It crosses in messages.
        self.number = 0
        self._changed = threading.Condition()
        self._begun = 0
        self._asked = 0  # questions, of those who exchange nothing, that are still to be put
        self._over = False
        self._most: int | None = None  # iterations that may be begun before it is known which one is the last
        self._last: int | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if meeting is not None:
            self._thread = threading.Thread(target=self._run, args=(meeting,), name="megatron-lossy-stop", daemon=True)
            self._thread.start()

    def hear(self, number: int) -> None:
        """Somebody says that ``number`` tells to stop. On any thread."""
        with self._changed:
            self.number = max(self.number, number)
            self._changed.notify_all()

    def ask(self) -> None:
        """Ask the others whether they stop, without a wait. All islands ask equally often."""
        with self._changed:
            self._asked += 1
            self._changed.notify_all()

    def begin(self) -> tuple[int, int]:
        """The next iteration begins. Returns the signal and the last iteration, as far as they are known, or 0.

        Waits where it could be later than the last one. Raises what went wrong between islands.
        """
        with self._changed:
            self._begun += 1
            while self._most is not None and self._begun > self._most and self._last is None and self._error is None:
                self._changed.wait()
            self._check()
            return self.number, self._last or 0

    def leave(self) -> None:
        """Iterations are over: wait until they are so in all islands, which may still need what was sent from here."""
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
            mine = self._begun if self._over else self._begun + 1  # which begins when all of its ranks can know
        last = meeting.largest(mine, _PATIENCE)
        with self._changed:
            self._last = last
            self._changed.notify_all()
