"""A model of what the engine in C does: when one source of an exchange is over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# ``now`` is an argument, in seconds.


@dataclass
class Source:
    """The units of one source, from before the exchange is posted to its end.

    It is over when all units have arrived; or its END has, the reorder window has passed since, and all units are there
    that END says must be; or the deadline has, which counts from the posting. A unit that comes later is late, and is not
    applied.
    """

    units: int
    reorder: float
    deadline: float | None = None  # after the posting
    posted_at: float | None = None
    ended_at: float | None = None
    must: frozenset[int] = frozenset()
    over: bool = False
    arrived: set[int] = field(default_factory=set)

    def post(self, now: float) -> None:
        self.posted_at = now
        self._look()

    def data(self, unit: int) -> str:
        """Return the fate of a unit: ``taken``, ``early`` (kept until the posting), a ``duplicate``, ``late``."""
        if unit in self.arrived:
            return "duplicate"
        if self.over:
            return "late"
        self.arrived.add(unit)
        self._look()
        return "taken" if self.posted_at is not None else "early"

    def end(self, now: float, must: Iterable[int] = ()) -> None:
        if self.ended_at is None and not self.over:
            self.ended_at = now
            self.must = frozenset(must)

    def passes(self, now: float) -> None:
        """It is ``now``, and all that came before has been said."""
        if self.posted_at is None:
            return
        if self.ended_at is not None and now >= self.ended_at + self.reorder:
            self.over |= self.must <= self.arrived
        if self.deadline is not None and now >= self.posted_at + self.deadline:
            self.over = True

    def _look(self) -> None:
        if self.posted_at is not None and len(self.arrived) == self.units:
            self.over = True
