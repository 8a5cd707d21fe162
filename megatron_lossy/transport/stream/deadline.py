"""``--udp-deadline auto`` of streams: which sources a late exchange does without. Pure: times are arguments.

An exchange is late after 1.2 times the usual time of its bucket. From then on a source is done without if it stands still, and as
long as no more units are lost in this way, over all exchanges of the bucket, than the user accepts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

import numpy as np

#: The usual time is the median of so many exchanges, and of how many at least.
_HISTORY, _ENOUGH = 32, 10
#: Seconds that a thread may wait for a processor: they are part of the usual time.
_SLACK = 0.002
_LATE = 1.2
#: The losses that so many exchanges may have can happen in one of them.
_SAVED = 8
#: Between two looks at a late exchange is this part of its time so far, and of its usual time at least. A source stands still if less
#: than the other part of its message came meanwhile: half of what usually does.
_BETWEEN, _PART = 0.25, 0.125


class Pace:
    """The usual time of the exchanges of one bucket, and the units that may be lost. ``share``: of the units that have to arrive."""

    def __init__(self, share: float) -> None:
        self._took: deque[float] = deque(maxlen=_HISTORY)
        self._accepted = 1 - share
        self._credit = 0.0
        #: Seconds; infinite while too few exchanges are known.
        self.usual = math.inf

    def note(self, seconds: float) -> None:
        self._took.append(seconds)
        self._credit = min(self._credit + self._accepted, _SAVED * self._accepted)
        if len(self._took) >= _ENOUGH:
            self.usual = float(np.median(self._took)) + _SLACK

    def lose(self, share: float) -> bool:
        """Lose a share of the units of an exchange. Return whether that may be."""
        may = share <= self._credit
        self._credit -= share * may
        return may


class Looks:
    """The looks at one exchange, the first of which is before it is late."""

    def __init__(self, pace: Pace) -> None:
        self.pace = pace
        self._missed: Mapping[int, float] = {}
        self._next: float | None = None

    def due(self, start: float) -> float:
        """Return the time of the next look at an exchange that has begun at ``start``."""
        return start + self.pace.usual * (_LATE - _BETWEEN) if self._next is None else self._next

    def standing(self, start: float, now: float, misses: Mapping[int, float]) -> list[int]:
        """Look at the sources of which a share ``misses`` of their message is still to come, in an exchange that began at ``start``.

        Return those that stand still; first those that miss least.
        """
        before, self._missed = self._missed, misses
        self._next = now + _BETWEEN * max(self.pace.usual, now - start)
        still = [source for source, share in misses.items() if before.get(source, math.inf) - share < _PART]
        return sorted(still, key=lambda source: misses[source])
