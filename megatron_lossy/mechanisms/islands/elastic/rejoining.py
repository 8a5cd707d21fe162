"""The way back of an island by a copy: whom it asks, one after the other, and what its ranks agree on (docs/elastic.md).

While a copy is under way the island listens. All its ranks have their part of it, of the same sender as of the same exchange, or
the next sender is asked; if there is none left it goes on listening.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from functools import partial
from typing import Any

from ..copying import ASKER, SOURCE, Asking, Copy, GlooPair, Request, serve
from ..epochs import Member
from .meeting_place import meet
from .membership import Placed

logger = logging.getLogger(__name__)


class Rejoining:
    """The questions of rank ``rank`` of the island ``slot``, and its answers to others. ``patience``: seconds to wait for another rank."""

    def __init__(self, slot: int, rank: int, patience: float) -> None:
        self._slot, self._rank, self._patience = slot, rank, patience
        self._sources: list[Member] = []  # that were not asked yet
        self._placed: Placed | None = None
        self._asking: Asking | None = None
        self._number = 0  # of the latest question
        self._ended = False
        self._threads: list[threading.Thread] = []
        #: The member that is asked, and the number of the question.
        self.question: tuple[Member, int] | None = None

    # --- who comes back --------------------------------------------------------------------------------------------

    def begin(self, placed: Placed) -> None:
        """Ask the senders of ``placed``, from the slot after this one on."""
        members = placed.epoch.members
        others = [one for one in members if one.role == "send" and one.slot != self._slot]
        slots = max((one.slot for one in members), default=0) + 1
        self._sources = sorted(others, key=lambda one: (one.slot - self._slot) % slots)
        self._placed = placed
        self._ask()

    def _ask(self) -> None:
        """Ask the next source, or nobody."""
        self.question = self._asking = None
        if not self._sources:
            return
        assert self._placed is not None
        source = self._sources.pop(0)
        self._number += 1
        self.question = source, self._number
        own = next(one for one in self._placed.epoch.members if one.slot == self._slot)
        request = Request(self._slot, own.incarnation, self._number)
        placed = self._placed
        self._asking = asking = Asking(lambda: self._pair(placed, source.slot, request, ASKER))
        self._threads.append(asking.thread)

    def give_up(self) -> None:
        """No copy is wanted any more."""
        self._sources, self.question, self._asking = [], None, None

    @property
    def said(self) -> tuple[int, int]:
        """Numbers whose largest over the ranks :meth:`agreed` takes: of a question that failed here; less the latest that came."""
        asking = self._asking
        failed = self._number if asking is not None and asking.why is not None else 0
        came = self._number if asking is not None and asking.copy is not None else 0
        return failed, -came

    def agreed(self, failed: int, came: int) -> tuple[Copy, Member] | None:
        """The copy, once all ranks have theirs, and its source. Asks the next source if some rank has none."""
        if self.question is None or self._asking is None:
            return None
        source, number = self.question
        if failed == number:
            why = self._asking.why or "another rank of this island did not get it"
            logger.warning("island %d: no copy of island %d (%s)", self._slot, source.slot, why)
            self._ask()
            if self.question is None:
                logger.warning("island %d: no island left to copy; it listens", self._slot)
            return None
        if -came != number:
            return None
        copy = self._asking.copy
        assert copy is not None, number
        self.give_up()
        return copy, source

    # --- who is asked ----------------------------------------------------------------------------------------------

    def serve(self, request: Request, placed: Placed, values: dict[str, Any], made: int) -> None:
        """Send ``values``, the state after ``made`` iterations of the run, to the rank of this number that asked."""

        def served(digest: str) -> None:
            logger.warning(
                "island %d: island %d copies it as of iteration %d, rank %d %s",
                self._slot,
                request.slot,
                made,
                self._rank,
                digest,
            )

        source = partial(self._pair, placed, self._slot, request, SOURCE)
        self._threads.append(serve(source, values, made, served))

    def _pair(self, placed: Placed, source: int, request: Request, place: int) -> GlooPair:
        begun = "/".join(map(str, request.incarnation))
        prefix = f"copy/{request.slot}/{begun}/{request.number}/{self._rank}"
        patience = self._patience
        ends = (f"island {source}", f"island {request.slot}")
        store = meet(placed.stores[source], prefix, ends[place], ends, patience, patience, lambda: self._ended)
        return GlooPair(store, place, timedelta(seconds=self._patience))

    def end(self) -> None:
        """Wait for nobody any more, but for what is under way."""
        self._ended = True
        until = time.monotonic() + self._patience
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
