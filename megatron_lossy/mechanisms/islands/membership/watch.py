"""A thread that polls the store for one island, so that training waits for no answer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ....base.errors import first_line
from .protocol import ANY, Island, Local, Plan
from .store import Store

logger = logging.getLogger(__name__)
#: Begins all keys that a poll reads.
_NOW = "now/"


class Watch:
    """Polls ``store`` for ``island``, from now until :meth:`close`, or until the island is refused or has lost its slot.

    ``local()``: the state of the island, asked for anew each time. ``act(plan)`` gets each plan, once it is written; an empty one if
    there is none. Both are called on the thread, and so is ``log``, with one line when the store stops to answer, and when it answers
    again.
    """

    def __init__(
        self,
        store: Store,
        island: Island,
        local: Callable[[], Local],
        act: Callable[[Plan], None],
        log: Callable[[str], None] = logger.warning,
    ) -> None:
        self._store, self._island, self._local, self._act, self._log = store, island, local, act, log
        self._end = threading.Event()
        self._failed: Exception | None = None
        #: The reason why the last poll failed; empty after one that did not.
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ``local`` or ``act`` raised: nothing is polled any more."""
        if self._failed is not None:
            raise self._failed

    def close(self) -> None:
        """Poll once more, and end: ``local()`` must say by now that the island leaves."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            plan, last = Plan(), False
            while not (last or plan.refused or plan.lost):
                last = self._end.is_set()
                plan = self._poll(self._local()) or Plan()
                self._act(plan)
                self._end.wait(self._island.times.poll)
        except Exception as error:
            self._failed = error

    def _poll(self, local: Local) -> Plan | None:
        """The plan, which is written; ``None`` if the store did not answer, or has what nobody understands."""
        try:
            texts = {key.removeprefix(_NOW): text for key, text in self._store.list(_NOW).items()}
            plan = self._island.poll(time.monotonic(), texts, local)
            for write in plan.writes:
                if write.old is ANY:
                    self._store.put(_NOW + write.key, write.new)
                else:
                    self._store.put_if(_NOW + write.key, write.old, write.new)
        except Exception as error:  # nothing that comes from the store may end a healthy island
            self._island.missed()
            if not self.why:
                self._log(f"--rendezvous: {first_line(error)}; going on as before")
            self.why = first_line(error)
            return None
        if self.why:
            self._log("--rendezvous: answers again")
        self.why = ""
        return plan
