"""The standing of one island of real ranks in the run: whether it sends, and how far behind it is."""

from __future__ import annotations

from ..epochs import Epoch
from ..presence import Slot, needed_visits

#: An iteration that takes as many times as long as the one before, or as the patience, is one in which the island stood still.
_STILL = 3.0


class Standing:
    """The standing of the island ``slot``. ``overlap``: see :func:`.presence.needed_visits`.

    ``slots``, ``members``: as of :class:`.Presence`, of this island alone.
    """

    def __init__(self, slot: int, overlap: int) -> None:
        self.slot = Slot()
        #: Whether this island has stood still since it last sent: its process is new, or was frozen.
        self.stood_still = False
        self._began: float | None = None
        self._took = 0.0
        self.slots, self.members = [self.slot], [0]
        self._number, self._overlap = slot, overlap

    @property
    def role(self) -> str:
        """Its role from its next epoch on."""
        return "listen" if self.slot.listens else "send"

    def enter(self, epoch: Epoch, own: bool) -> None:
        """``epoch`` is the first of this island. ``own``: it has weights of the run, and not those that it began with."""
        self.slot.own, self.stood_still = own, True
        self.slot.listens |= self._number not in epoch.senders

    def begins(self, seconds: float, patience: float) -> None:
        """Note that an iteration begins at ``seconds`` of a clock. ``patience``: seconds that an iteration may wait for others."""
        if self._began is not None:
            took, usual = seconds - self._began, max(self._took, patience)
            self.stood_still |= took > _STILL * usual
            self._took = took
        self._began = seconds

    def behind(self, now: int, keep: int) -> bool:
        """Note that the run has made ``now`` iterations without this island. Return whether the island listens from now on.

        Weights of an island that has trained all the time are not old: it keeps them.
        """
        if self.stood_still and self.slot.stopped(now, keep):
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
        self.slot.sent, self.slot.made, self.stood_still = now, 0, False
