"""The way back of an island by a copy (docs/elastic.md): an entry says who copies, and the next sender by slot is its source.

While a copy is under way the island listens. All its ranks have their part of it, of the same sender as of the same exchange; else it
goes on listening.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ....base.errors import first_line
from ..copying import Copy, receive_copy, send_copy
from .connections import Pair

logger = logging.getLogger(__name__)


class Parts:
    """A copy on the connection ``pair``. ``seconds``: for each part to leave."""

    def __init__(self, pair: Pair, seconds: float) -> None:
        self._pair, self._seconds, self._number = pair, seconds, 0

    def send(self, data: torch.Tensor) -> None:
        """See :class:`.copying.Pair`."""
        self._number += 1
        self._pair.put("copy", self._number, data, self._seconds)

    def receive(self, data: torch.Tensor) -> None:
        """See :class:`.copying.Pair`. The first part may be long in coming: the source sends at an exchange of the epoch."""
        self._number += 1
        self._pair.get("copy", self._number, data, self._seconds if self._number > 1 else math.inf)


def source_of(slot: int, senders: Sequence[int], islands: int) -> int:
    """The island that ``slot`` copies: the next of ``senders``."""
    return min(senders, key=lambda other: (other - slot) % islands)


class Rejoining:
    """The copies of rank ``rank`` of the island ``slot``. ``seconds``: for each part."""

    def __init__(self, slot: int, rank: int, seconds: float) -> None:
        self._slot, self._rank, self._seconds = slot, rank, seconds
        #: The copies that have come and their sources, by the number of the epoch that they were sent in.
        self.copies: dict[int, tuple[Copy, int]] = {}
        self._threads: list[threading.Thread] = []

    @property
    def came(self) -> int:
        """The number of the latest epoch of which a copy has come; -1: there is none."""
        return max(list(self.copies), default=-1)

    def take(self, epoch: int) -> tuple[Copy, int]:
        """Return the copy of the epoch number ``epoch`` and its source, and keep it no longer, nor older ones."""
        found = self.copies[epoch]
        for number in [one for one in self.copies if one <= epoch]:
            del self.copies[number]
        return found

    def receive(self, pair: Pair, epoch: int) -> None:
        """Receive the copy of the source behind ``pair``, on a thread, as a member of the epoch number ``epoch``."""

        def run() -> None:
            with pair.used():
                copy = receive_copy(Parts(pair, self._seconds))
            self.copies[epoch] = copy, pair.slot

        self._begin(run, f"no copy of island {pair.slot}; it listens")

    def serve(self, pair: Pair, values: dict[str, Any], made: int) -> None:
        """Send ``values``, the state after ``made`` iterations of the run, to the member behind ``pair``, on a thread."""

        def run() -> None:
            with pair.used():
                digest = send_copy(Parts(pair, self._seconds), values, made)
            ours = f"island {self._slot}: island {pair.slot} copies it"
            logger.warning("%s as of iteration %d, rank %d %s", ours, made, self._rank, digest)

        self._begin(run, f"island {pair.slot} does not get its copy")

    def _begin(self, run: Callable[[], None], failed: str) -> None:
        def guarded() -> None:
            try:
                run()
            except Exception as error:  # the other one is gone, or what came is damaged
                logger.warning("island %d: %s (%s)", self._slot, failed, first_line(error))

        self._threads.append(threading.Thread(target=guarded, name="megatron-lossy-copy", daemon=True))
        self._threads[-1].start()

    def end(self) -> None:
        """Wait for what is under way."""
        for thread in self._threads:
            thread.join(self._seconds)
