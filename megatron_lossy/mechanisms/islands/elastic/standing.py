"""The standing of one island of real ranks in the run: whether it sends, and how far behind it is."""

from __future__ import annotations

from ..presence import Slot, needed_visits


class Standing:
    """The standing of an island. ``overlap``: see :func:`.presence.needed_visits`.

    ``slots``, ``members``: as of :class:`.Presence`, of this island alone.
    """

    def __init__(self, overlap: int) -> None:
        self.slot = Slot()
        self.slots, self.members = [self.slot], [0]
        self._overlap = overlap

    def enter(self, made: int) -> None:
        """It begins after ``made`` iterations. Without any its weights are the run's only if all begin."""
        self.slot.own, self.slot.sent = made > 0, made

    def joins(self, now: int, keep: int) -> bool:
        """It is in an epoch of others, which have made ``now`` iterations. Return whether it begins to listen.

        Weights of an island that has trained most of the time are not old: it keeps them.
        """
        before = self.slot.listens
        self.slot.own |= now == 0
        self.slot.listens |= not self.slot.own or self.slot.stopped(now, keep)
        return self.slot.listens and not before

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
