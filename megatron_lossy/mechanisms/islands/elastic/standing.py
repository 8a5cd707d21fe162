"""The standing of one island of real ranks in the run: whether it sends, and how far behind it is."""

from __future__ import annotations

from ..epochs import Epoch
from ..presence import Slot, needed_visits


class Standing:
    """The standing of the island ``slot``. ``overlap``: see :func:`.presence.needed_visits`.

    ``slots``, ``members``: as of :class:`.Presence`, of this island alone.
    """

    def __init__(self, slot: int, overlap: int) -> None:
        self.slot = Slot()
        self.slots, self.members = [self.slot], [0]
        self._number, self._overlap = slot, overlap

    @property
    def role(self) -> str:
        """Its role from its next epoch on."""
        return "listen" if self.slot.listens else "send"

    def enter(self, epoch: Epoch, own: bool) -> None:
        """``epoch`` is the first of this island. ``own``: it has weights of the run, and not those that it began with."""
        self.slot.own = own
        self.slot.listens |= self._number not in epoch.senders

    def behind(self, now: int, keep: int) -> bool:
        """The run has made ``now`` iterations, and this island did not take part. Returns whether it listens from now on."""
        if self.slot.stopped(now, keep):
            self.slot.listens = True
        return self.slot.listens

    def copied(self, made: int, now: int, keep: int) -> None:
        """It has the state of a sender as of ``made`` iterations of the run, which has made ``now``."""
        self.slot.own, self.slot.sent, self.slot.made = True, made, 0
        self.slot.listens = self.slot.stopped(now, keep)

    def may_send(self, visits: int) -> bool:
        """An exchange begins. Returns whether the island is about to send again.

        ``visits``: how often means have set each element since it began to listen, at least.
        """
        if self.slot.listens and visits >= needed_visits(self._overlap, self.slot.own):
            self.slot.listens, self.slot.own = False, True
            return True
        return False

    def sent(self, now: int) -> None:
        """It has sent after ``now`` iterations of the run."""
        self.slot.sent, self.slot.made = now, 0
