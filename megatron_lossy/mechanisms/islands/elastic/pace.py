"""The pace of an island that waits for nobody: that of its exchanges with others, so that it does not leave the run behind."""

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

    def early(self, now: float) -> float:
        """Seconds until the next exchange usually begins, with others; 0 if it is late, or there was none with them."""
        if self._began is None or not self._took:
            return 0.0
        return max(0.0, self._began + median(self._took) - now)

    def wait(self, now: float, ahead: float | None, little: float) -> float:
        """Seconds to wait before an exchange. ``ahead``: by how many this island is, of those that it is to meet; ``None``: it is not known.

        Answers are seconds old: if nobody were ahead of what was heard, all would slow each other down. At most ``little``: who sleeps
        hears nothing, and opens no epoch.
        """
        if ahead is not None and ahead < 0:
            return 0.0
        return min(max((ahead or 0.0) - little, self.early(now)), little)
