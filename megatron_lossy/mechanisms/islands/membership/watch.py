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

    ``local()``: the state of the island, asked for anew each time. ``act(plan)`` gets each plan, once it is written. Both are called
    on the thread, and so is ``log``, with one line when the store stops to answer, and when it answers again.
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
        #: The reason why the last poll failed; empty after one that did not.
        self.why = ""
        self._thread = threading.Thread(target=self._run, name="membership", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say that the island leaves, and poll no more. ``local()`` must say so by now."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            last = self._end.is_set()
            plan = self._poll()
            if last or (plan is not None and (plan.refused or plan.lost)):
                return
            self._end.wait(self._island.times.poll)

    def _poll(self) -> Plan | None:
        """The plan of one poll, which is written; ``None`` if the store did not answer, or something else went wrong."""
        try:
            texts = {key.removeprefix(_NOW): text for key, text in self._store.list(_NOW).items()}
            plan = self._island.poll(time.monotonic(), texts, self._local())
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
        self._act(plan)
        return plan
