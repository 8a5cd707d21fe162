"""Carriers of exchanges between ranks of one number of all islands, or of the members of an epoch: over gloo, or as datagrams.

An epoch is opened on a thread, while training goes on (:mod:`.elastic.opening`). A member that dies, or stands still for longer than the
patience, breaks it over gloo: what is under way is lost whole, and so is the rest of the epoch. Of datagrams only those from and to that
member are lost.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from .epochs import Epoch
from .world import Meeting

Total = Callable[[torch.Tensor], torch.Tensor]

#: The most seconds that an end waits for messages that others still ask for.
LINGER = 10.0


class Carrier(ABC):
    """Carries one exchange after the other between the islands, in host memory."""

    #: Whether it reports losses.
    observes = False

    @abstractmethod
    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """Send ``pieces`` [M, n], one to each island. Returns the pieces for this island [M, n], and the arrived units.

        The second is bool[M, units or more]; ``None``: all. Items that did not arrive are zero.
        """

    @abstractmethod
    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """[M, n]: ``own`` [n] of every island, and the units that arrived as in :meth:`scatter`."""

    def do_without(self, place: int) -> None:
        """Wait no more for the island in ``place``, where the others can go on without it."""

    def close(self) -> None:
        """Close the carrier after the last exchange."""


class Collectives(Carrier):
    """Exchanges over torch among the members of ``meeting``, of which those in ``senders``, their places, are averaged."""

    def __init__(self, meeting: Meeting, senders: Sequence[int]) -> None:
        self._meeting: Meeting | None = meeting
        self._senders = list(senders)
        self._sending = [place in senders for place in range(meeting.islands)]
        self._sends = self._sending[meeting.island]

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, np.ndarray | None]:
        """See :class:`.Carrier`. Nothing comes to who does not send."""
        if self._sends:
            return self._open().all_to_all(pieces, self._sending), None
        self._open().all_to_all(pieces[:0], [False for _ in self._sending])
        return torch.zeros_like(pieces), np.zeros(pieces.shape, dtype=bool)

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        received = self._open().all_gather(own)
        return received if all(self._sending) else received[self._senders], None

    def _open(self) -> Meeting:
        if self._meeting is None:
            raise RuntimeError("the epoch is closed")
        return self._meeting

    def close(self) -> None:
        """Let the others see that it is over: without its last user a group closes its connections."""
        self._meeting = None


class Alone(Carrier):
    """The exchanges of the only member: nothing crosses."""

    def scatter(self, pieces: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return pieces, None

    def gather(self, own: torch.Tensor) -> tuple[torch.Tensor, None]:
        """See :class:`.Carrier`."""
        return own[None], None


class Among:
    """The members of an epoch in their order, as the island ``slot`` sees them.

    ``lanes``: by shard of this rank, what carries its exchanges, which take turns. ``total``: adds a tensor up over the senders, in
    their order; ``None``: they do not, or this island is none of them.
    """

    def __init__(self, epoch: Epoch, slot: int, lanes: Sequence[Sequence[Carrier]], total: Total | None = None) -> None:
        self.epoch, self._lanes, self.total = epoch, [list(one) for one in lanes], total
        self.senders = epoch.senders
        #: The place of this island among the senders, or ``None``: it listens.
        self.place = self.senders.index(slot) if slot in self.senders else None
        self._changed = threading.Lock()
        self._under_way = 0
        self._retired = self.broken = False
        #: Whether others were there: an exchange with them is over.
        self.met = False
        self._slot = slot
        self._without: set[int] = set()
        self._next = epoch.first
        self._closing: threading.Thread | None = None

    def do_without(self, slot: int) -> bool:
        """Nothing of ``slot`` arrives any more: no lane waits for it, and the others go on. Returns whether that is new."""
        with self._changed:
            if slot in self._without:
                return False
            self._without.add(slot)
            for lane in (lane for of_shard in self._lanes for lane in of_shard):
                lane.do_without(self.epoch.slots.index(slot))
            return True

    @property
    def over(self) -> bool:
        """Whether no exchange will begin in it any more."""
        return self.broken or self._retired

    @property
    def waits(self) -> bool:
        """Whether another sender is there, which this island waits for."""
        return bool({*self.senders} - self._without - {self._slot})

    @property
    def together(self) -> bool:
        """Whether exchanges are made with others."""
        return self.met and not self.broken and self.waits

    @property
    def alone(self) -> bool:
        """Whether there were others, and nothing of any of them arrives any more."""
        return len(self.epoch.slots) > 1 and self._without >= {*self.epoch.slots} - {self._slot}

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
                self._clear()

    def lane(self, shard: int, turn: int) -> Carrier:
        """The carrier of an exchange of ``shard`` on the thread ``turn``. Raises :class:`RuntimeError` if the epoch is closed."""
        with self._changed:
            if self.broken or not self._lanes:
                raise RuntimeError("the epoch is closed")
            return self._lanes[shard][turn]

    def retire(self) -> None:
        """No exchange will begin in it any more; those under way come to their end."""
        with self._changed:
            self._retired = True
            if not self._under_way:
                self._clear()

    def close(self) -> None:
        """Let all see that it is over, by its connections: nobody waits for this island in it."""
        with self._changed:
            self.broken = True
            self._clear()

    def _clear(self) -> None:
        lanes, self._lanes, self.total = [lane for of_shard in self._lanes for lane in of_shard], [], None
        if lanes:  # which may wait until what was sent has left
            self._closing = threading.Thread(target=close_all, args=[lanes], name="megatron-lossy-epoch", daemon=True)
            self._closing.start()

    def wait_closed(self) -> None:
        """Wait until what was sent has left."""
        if self._closing is not None:
            self._closing.join(LINGER)


def close_all(lanes: list[Carrier]) -> None:
    """Close ``lanes``, and keep none of them."""
    while lanes:
        lanes.pop().close()


class Links:
    """The datagrams of the island ``slot`` to and from others, over all epochs, as one link. Its ranks are slots."""

    name = "islands"

    def __init__(self, slot: int) -> None:
        self.rank = slot
        self._links: list[tuple[Any, list[int]]] = []

    def add(self, link: Any, slots: list[int]) -> None:
        """``link``: a new one among ``slots``."""
        self._links.append((link, slots))

    def counters(self) -> dict[int, dict[str, int]]:
        """The counters of every other island so far."""
        found: dict[int, Counter[str]] = {}
        for link, slots in list(self._links):
            for place, counts in link.counters().items():
                found.setdefault(slots[place], Counter()).update(counts)
        return {slot: dict(found[slot]) for slot in sorted(found)}

    def rates(self) -> dict[int, dict[str, float]]:
        """The rates towards every other island, of the latest epoch that it was in."""
        return {slots[place]: rate for link, slots in list(self._links) for place, rate in link.rates().items()}
