"""The standing of one island of real ranks in the run: whether it sends, how far behind it is, and its pace."""

from __future__ import annotations

from collections import deque
from statistics import median

from ..epochs import Epoch
from ..presence import Slot, needed_visits

#: Iterations that the usual time of one is taken from.
_RECENT = 20
#: Exchanges that the usual time from one to the next is taken from.
_EXCHANGES = 50


class Standing:
    """The standing of the island ``slot``. ``overlap``: see :func:`.presence.needed_visits`.

    ``slots``, ``members``: as of :class:`.Presence`, of this island alone.
    """

    def __init__(self, slot: int, overlap: int) -> None:
        self.slot = Slot()
        #: Whether this island has stood still since it last exchanged with others: its process is new, or was frozen.
        self.stood_still = False
        self._together = 0  # exchanges in a row with others that have begun since then
        self._began: float | None = None
        self._took: deque[float] = deque(maxlen=_RECENT)
        self.slots, self.members = [self.slot], [0]
        self._number, self._overlap = slot, overlap

    @property
    def role(self) -> str:
        """Its role from its next epoch on."""
        return "listen" if self.slot.listens else "send"

    def enter(self, epoch: Epoch, own: bool) -> None:
        """``epoch`` is the first of this island. ``own``: it has weights of the run, and not those that it began with."""
        self.slot.own = own
        self._stands_still()
        self.slot.listens |= self._number not in epoch.senders

    def begins(self, seconds: float, patience: float) -> None:
        """Note that an iteration begins at ``seconds`` of a clock. ``patience``: seconds that an iteration may wait for others."""
        if self._began is not None:
            took = seconds - self._began
            if took > median(self._took or [0.0]) + patience:
                self._stands_still()
            self._took.append(took)
        self._began = seconds

    def _stands_still(self) -> None:
        self.stood_still, self._together = True, 0

    def exchanges(self, together: bool) -> None:
        """Note that an exchange begins. ``together``: whether the one before was made with others.

        A pause is over once those under way have come back: until then the others may be gone, and it is not known yet.
        """
        self.stood_still &= not together or self._together <= self._overlap
        self._together = self._together + 1 if together else 0

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
        self.slot.sent, self.slot.made = now, 0


class Pace:
    """The pace of an island that waits for no other: that of its exchanges with others, or else theirs.

    So it does not leave the run behind. Times are those of one clock, in seconds.
    """

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_EXCHANGES)
        self._began: float | None = None
        self._waited = False

    def begins(self, now: float, waits: bool) -> None:
        """An exchange begins. ``waits``: for others."""
        if self._began is not None and self._waited:
            self._took.append(now - self._began)
        self._began, self._waited = now, waits

    @property
    def kept(self) -> float | None:
        """Seconds from one exchange to the next, usually, with others; ``None``: there were none with them."""
        return median(self._took) if self._took else None

    def early(self, now: float, others: float | None = None) -> float:
        """Seconds until the next exchange usually begins, with others; 0 if it is late.

        ``others``: the pace of others, which counts as long as this island has none; ``None``: nor have they.
        """
        kept = self.kept
        pace = others if kept is None else kept
        if self._began is None or pace is None:
            return 0.0
        return max(0.0, self._began + pace - now)

    def wait(self, now: float, ahead: float | None, others: float | None, little: float) -> float:
        """Seconds to wait before an exchange. ``ahead``: by how many this island is, of those that it is to meet; ``None``: it is not known.

        Answers are seconds old: if nobody were ahead of what was heard, all would slow each other down, and if who is a bit behind did
        not wait at all, two that think so of each other would run away together. At most ``little``: who sleeps hears nothing, and
        opens no epoch. ``others``: see :meth:`early`.
        """
        ahead = ahead or 0.0
        kept = self.early(now, others) * max(0.0, 1.0 + min(ahead, 0.0) / little)
        return min(max(ahead - little, kept), little)
