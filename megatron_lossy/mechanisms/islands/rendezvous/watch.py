"""A thread that asks again and again, so that training does not wait for an answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from .lighthouse import Data, Lighthouse, Unreachable

logger = logging.getLogger(__name__)


class Watch:
    """Asks ``rendezvous`` every ``poll`` seconds, from now until :meth:`close`.

    ``tell()``: what is said, (step, data), asked for anew each time. ``hear(answer)``: is called on the thread with each answer.
    While nobody answers all goes on with the last one; that is said once, and so is the end of it.
    """

    def __init__(
        self,
        rendezvous: Lighthouse,
        poll: float,
        tell: Callable[[], tuple[int, Data]],
        hear: Callable[[list[Data]], None],
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self._rendezvous, self._poll, self._tell, self._hear, self._log = rendezvous, poll, tell, hear, log
        self._end = threading.Event()
        self._failed: BaseException | None = None
        self._alone = self._answered = False
        self._began = time.monotonic()
        #: The reason why no lighthouse answered last; empty once one does.
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="rendezvous", daemon=True)
        self._thread.start()

    @property
    def silent_for(self) -> float:
        """Seconds since the last answer, or since the start."""
        return time.monotonic() - self._began

    def check(self) -> None:
        """Raise what ``tell`` or ``hear`` raised: nobody is asked any more."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Ask no more, once an answer under way has come: a process that ends in foreign code ends in an error."""
        self._end.set()
        self._thread.join()
        self._rendezvous.close()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                self._ask()
            except Exception as error:
                self._failed = error
                return
            self._end.wait(self._poll)

    def _ask(self) -> None:
        try:
            answer = self._rendezvous.ask(*self._tell())
        except Unreachable as error:
            self.why = str(error)
            if not self._alone and not self._end.is_set():
                self._log(f"--rendezvous: {error}; {'going on as before' if self._answered else 'asking again'}")
            self._alone = True
            return
        self._answered, self._began, self.why = True, time.monotonic(), ""
        if self._end.is_set():
            return
        if self._alone:
            self._log("--rendezvous: answers again")
        self._alone = False
        self._hear(answer)
