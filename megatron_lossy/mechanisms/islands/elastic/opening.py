"""Opens epochs of islands that are launches of their own, on a thread, while training goes on."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from ....base.errors import first_line
from ....config import LossyConfig
from ..carrying import LINGER, Alone, Among, Carrier, Collectives, Links, Total, close_all
from ..world import Meeting
from .meeting_place import meet
from .membership import Placed

logger = logging.getLogger(__name__)


class Opening:
    """``placed`` being opened by ``open``, on a thread, for the island ``slot``."""

    def __init__(self, placed: Placed, slot: int, open: Opener) -> None:
        self.placed, self._slot, self._open = placed, slot, open
        self._among: Among | None = None
        self._over = threading.Event()
        self._given_up = False
        self._without: list[int] = []
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-epoch", daemon=True)
        self._thread.start()

    def among(self, wait: float = 0.0) -> Among | None:
        """The opened epoch; ``None``: not yet, or it failed. ``wait``: seconds to wait until it is known."""
        if wait:
            self._over.wait(wait)
        return self._among

    @property
    def usable(self) -> bool:
        """Whether it is open, or may still be."""
        return not (self._given_up or self.failed) and (self._among is None or not self._among.broken)

    @property
    def failed(self) -> bool:
        """Whether the members did not meet."""
        return self._over.is_set() and self._among is None

    def do_without(self, slot: int) -> None:
        """The member ``slot`` is not waited for in exchanges."""
        self._without.append(slot)  # before it is seen whether there are lanes: who opens them looks later
        if self._among is not None:
            self._among.do_without(slot)

    def abandon(self) -> None:
        """It is of no use: whoever is in it sees that by its connections."""
        self._given_up = True
        if self._among is not None:
            self._among.close()

    def end(self) -> None:
        """:meth:`abandon`, and wait until that is done: a process that ends meanwhile would end in an error of torch's."""
        self.abandon()
        self._thread.join(LINGER)
        if self._among is not None:
            self._among.wait_closed()

    def _run(self) -> None:
        try:
            among = Among(self.placed.epoch, self._slot, *self._open(self.placed, lambda: self._given_up))
            self._among = among
            if self._given_up:  # before or after that
                among.close()
            for slot in self._without:
                among.do_without(slot)
        except Exception as error:  # of torch's stores and groups; of a store that nobody knows any more
            logger.warning("islands %s do not meet: %s", self.placed.epoch.slots, first_line(error))
        finally:
            self._over.set()


class Opener:
    """Opens epochs for rank ``rank`` of the island ``slot``.

    ``most``: by shard, the most elements of an exchange. ``engine``: of datagrams, if they carry exchanges. ``loses``: a member of which
    no datagram comes breaks no epoch; it is called on a thread with the epoch, the slot, why, the seconds that were waited, and whether
    the member has left by itself.
    """

    def __init__(
        self,
        config: LossyConfig,
        slot: int,
        rank: int,
        most: Sequence[int],
        engine: Any,
        loses: Callable[[Placed, int, str, float, bool], None],
    ) -> None:
        self._config, self._slot, self._rank, self._loses = config, slot, rank, loses
        self._most, self._engine = most, engine
        #: All datagrams so far.
        self.links = Links(slot)

    def __call__(self, placed: Placed, given_up: Callable[[], bool]) -> tuple[list[list[Carrier]], Total | None]:
        """The lanes and the ``total`` of an :class:`Among`. Waits for the other members, unless that is ``given_up``."""
        epoch, config = placed.epoch, self._config
        slots = epoch.slots
        if len(slots) == 1:
            return [[Alone() for _ in range(config.lanes)] for _ in self._most], _same
        # Nobody waits for a message before it is used.
        patience = config.island_patience + config.rounds_under_way * placed.usual
        prefix = f"{epoch.id}/{epoch.first}/sync/{self._rank}"
        coming = patience + placed.heard_within
        own, names = f"island {self._slot}", [f"island {slot}" for slot in slots]
        store = meet(placed.stores[slots[0]], prefix, own, names, coming, patience, given_up)
        total: Total | None = None
        if config.meets_whole and self._slot in epoch.senders:
            total = _same
            if len(epoch.senders) > 1:
                whole, place = torch.distributed.PrefixStore("whole", store), epoch.senders.index(self._slot)
                total = Meeting(whole, place, len(epoch.senders), timedelta(seconds=patience)).total
        lanes: list[list[Carrier]] = []
        try:
            for shard in range(len(self._most)):
                lanes.append([])
                for lane in range(config.lanes):
                    lanes[-1].append(self._carrier(placed, store, patience, shard, lane))
        except BaseException:  # a member has died meanwhile, for example
            close_all([lane for of_shard in lanes for lane in of_shard])
            raise
        return lanes, total

    def _carrier(self, placed: Placed, store: Any, patience: float, shard: int, lane: int) -> Carrier:
        epoch, slots, name = placed.epoch, placed.epoch.slots, f"{shard}/{lane}"
        own, place = torch.distributed.PrefixStore(name, store), slots.index(self._slot)
        senders = [slots.index(slot) for slot in epoch.senders]
        if not self._config.observed:
            return Collectives(Meeting(own, place, len(slots), timedelta(seconds=patience)), senders)
        from ..datagrams import IslandLink  # which starts a thread

        link = IslandLink(
            self._config,
            name,
            place,
            len(slots),
            own,
            self._most[shard],
            patience,
            senders=senders,
            called=slots,
            engine=self._engine,
            loses=lambda place, *more: self._loses(placed, slots[place], *more),
        )
        self.links.add(link, slots)
        return link


def _same(values: torch.Tensor) -> torch.Tensor:
    return values
