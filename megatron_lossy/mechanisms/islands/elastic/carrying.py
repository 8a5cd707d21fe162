"""Carries the exchanges of one epoch: a group of its members' ranks of one number, over gloo.

It is opened on a thread, while training goes on. A member that dies, or stands still for longer than the patience, breaks it: what
is under way is lost whole, and so is the rest of the epoch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from ..epochs import Epoch
from ..world import Meeting
from .membership import Placed

logger = logging.getLogger(__name__)


class Among:
    """The members of an epoch in their order, as the island ``slot`` sees them, and ``lanes``: a group for each exchange at once."""

    def __init__(self, epoch: Epoch, slot: int, lanes: Sequence[Meeting]) -> None:
        self.epoch, self._lanes = epoch, list(lanes)
        self.senders, self.receivers = epoch.senders, epoch.slots
        #: The place of this island among the senders, or ``None``: it listens.
        self.place = self.senders.index(slot) if slot in self.senders else None
        self._alone = len(self.receivers) == 1
        self._changed = threading.Lock()
        self._under_way = 0
        self._retired = self.broken = False
        self._next = epoch.first

    def reach(self, exchange: int) -> bool:
        """Whether ``exchange`` is the next one: all members make those of an epoch from the first on, and meet in their order."""
        fits, self._next = exchange == self._next, exchange + 1
        return fits

    def begin(self) -> None:
        """An exchange is to be made. :meth:`end` follows."""
        with self._changed:
            self._under_way += 1

    def end(self) -> None:
        """It is over."""
        with self._changed:
            self._under_way -= 1
            if self._retired and not self._under_way:
                self._lanes.clear()

    def scatter(self, lane: int, pieces: torch.Tensor) -> torch.Tensor:
        """[P, n]: the pieces of all senders for this one, a sender. ``pieces`` [P, n]: one for each."""
        if self._alone:
            return pieces
        return self._open(lane).all_to_all_among(pieces, [slot in self.senders for slot in self.receivers])

    def listen(self, lane: int, like: torch.Tensor) -> None:
        """Let senders exchange pieces without this one. ``like``: as those."""
        self._open(lane).all_to_all_among(like[:0], [False for _ in self.receivers])

    def gather(self, lane: int, own: torch.Tensor) -> torch.Tensor:
        """[P, n]: the means of all senders. ``own`` [n]: that of this one; of a listener it does not matter what."""
        if self._alone:
            return own[None]
        rows = self._open(lane).all_gather(own)
        return rows[[place for place, slot in enumerate(self.receivers) if slot in self.senders]]

    def _open(self, lane: int) -> Meeting:
        with self._changed:
            if self.broken or not self._lanes:
                raise RuntimeError("the epoch is closed")
            return self._lanes[lane]

    def retire(self) -> None:
        """No exchange will begin in it any more; those under way come to their end."""
        with self._changed:
            self._retired = True
            if not self._under_way:
                self._lanes.clear()

    def close(self) -> None:
        """Let all see that it is over, by its connections: nobody waits for this island in it."""
        with self._changed:
            self.broken = True
            self._lanes.clear()


class Opening:
    """``placed`` being opened on a thread, for rank ``rank`` of the island ``slot``. ``patience``: seconds to wait for a member."""

    def __init__(self, placed: Placed, slot: int, rank: int, lanes: int, name: str, patience: float) -> None:
        self.placed, self._slot, self._rank, self._lanes = placed, slot, rank, lanes
        self._name, self._patience = name, timedelta(seconds=patience)
        self._among: Among | None = None
        self._over = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-epoch", daemon=True)
        self._thread.start()

    def among(self, wait: bool = False) -> Among | None:
        """The opened epoch; ``None``: not yet, or it failed. ``wait``: until it is known."""
        if wait:
            self._over.wait()
        return self._among

    @property
    def usable(self) -> bool:
        """Whether it is open, or may still be."""
        among = self._among
        return not self._given_up and (not self._over.is_set() if among is None else not among.broken)

    def abandon(self) -> None:
        """It is of no use: whoever is in it sees that by its connections."""
        self._given_up = True
        if self._among is not None:
            self._among.close()

    def _run(self) -> None:
        try:
            among = Among(self.placed.epoch, self._slot, self._open())
            if self._given_up:
                among.close()
            self._among = among
        except Exception as error:  # of torch's stores and groups; of a store that nobody knows any more
            logger.warning("islands %s do not meet: %s", self.placed.epoch.slots, _first_line(error))
        finally:
            self._over.set()

    def _open(self) -> list[Meeting]:
        epoch = self.placed.epoch
        slots = epoch.slots
        if len(slots) == 1:
            return []
        host, port = self.placed.stores[slots[0]]
        store = torch.distributed.TCPStore(host, port, None, False, self._patience)
        prefix = f"{epoch.id}/{epoch.first}/{self._name}/{self._rank}"
        place = slots.index(self._slot)
        return [
            Meeting(torch.distributed.PrefixStore(f"{prefix}/{lane}", store), place, len(slots), self._patience)
            for lane in range(self._lanes)
        ]


def _first_line(error: BaseException) -> Any:
    return (str(error).splitlines() or [type(error).__name__])[0]
