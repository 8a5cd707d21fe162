"""The pace of an island that waits for nobody: that of its exchanges with others, or else theirs, so that it does not leave the run behind."""

from __future__ import annotations

from collections import deque
from statistics import median

#: Exchanges that are remembered.
_RECENT = 50


class Pace:
    """Times are those of one clock, in seconds."""

    def __init__(self) -> None:
        self._took: deque[float] = deque(maxlen=_RECENT)
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
