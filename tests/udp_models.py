"""Models of what the engine in C does: when one source of an exchange is over, and how fast one destination may be sent to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# --- the rate --------------------------------------------------------------------------------------------------------
# Times are in nanoseconds. Loss alone is no sign: links lose data at any rate. The signs of a full link are that
# datagrams 9 10 greatest of the last eight delivery rates.


MS = 1_000_000
SECOND = 1000 * MS
#: Least time of arrivals that says something about a rate.
INTERVAL = 4 * MS
#: Arrivals that are further apart (µs) are no evidence: nothing was sent, or nothing was received.
GAP = 8000
#: Datagrams that say something about a share of a tenth.
ENOUGH = 128


@dataclass
class Rate:
    floor: float
    ceiling: float
    fixed: bool = False

    rate: float = field(init=False)
    #: The share that is lost whatever we do: falls at once, rises slowly.
    foreign: float = 0.3
    greatest: float = 0.0
    starting: bool = True
    rtt_min: int | None = None

    def __post_init__(self) -> None:
        self.floor = min(self.floor, self.ceiling)
        self.rate = self.ceiling if self.fixed else self.floor
        self._recent = [0.0] * 8
        self._next = 0
        self._slots: list[float] = [float("inf"), float("inf")]
        self._slot_at = 0
        self._least = float("inf")
        self._stepped_at = 0
        self._last: tuple[int, int, int, int] | None = None
        self._span = self._bytes = 0.0
        self._numbers = self._arrived = 0

    def _set(self, rate: float) -> None:
        self.rate = min(max(rate, self.floor), self.ceiling)

    def sample(self, now: int, rtt: int) -> None:
        """A round trip took ``rtt``."""
        rtt = max(rtt, 1)
        first = self.rtt_min is None
        if first:
            self._slot_at = now
        elif now - self._slot_at >= 5 * SECOND:
            self._slots = [float("inf"), self._slots[0]]
            self._slot_at = now
        self._slots[0] = min(self._slots[0], rtt)
        self.rtt_min = int(min(self._slots))
        self._least = min(self._least, rtt)
        if first and not self.fixed:
            self._set(262144 * 1e9 / self.rtt_min)

    def report(self, now: int, datagrams: int, size: int, top: int, clock: int) -> None:
        """The destination has got ``datagrams`` of ``size`` bytes, up to the number ``top`` - 1, at its ``clock`` (µs)."""
        if self._last is not None:
            last_datagrams, last_size, last_top, last_clock = self._last
            if datagrams <= last_datagrams or top < last_top:
                return
            passed = (clock - last_clock) % 2**32
            if passed <= GAP:
                self._span += passed * 1e3
                self._bytes += size - last_size
            self._numbers += top - last_top
            self._arrived += datagrams - last_datagrams
        self._last = (datagrams, size, top, clock)
        if self.fixed or self.rtt_min is None or self._numbers < ENOUGH:
            return
        if self._span >= max(self.rtt_min // 4, INTERVAL):
            self._decide(now)
            self._span = self._bytes = 0.0
            self._numbers = self._arrived = 0
            self._least = float("inf")

    def _decide(self, now: int) -> None:
        assert self.rtt_min is not None
        lost = max(1 - self._arrived / self._numbers, 0.0) if self._numbers else 0.0
        self.foreign = lost if lost < self.foreign else self.foreign + 0.02 * (lost - self.foreign)
        self._recent[self._next % 8] = self._bytes * 1e9 / self._span / (1 - self.foreign)
        self._next += 1
        self.greatest = max(self._recent)
        queued = self._least < float("inf") and self._least - self.rtt_min > max(self.rtt_min // 8, 2 * MS)
        full = queued or lost > self.foreign + 0.12
        if self.starting:
            if full:
                self.starting = False
                self._set(self.greatest)
            elif now - self._stepped_at >= self.rtt_min and self.greatest > 0.6 * self.rate:
                self._set(2 * self.rate)
                self._stepped_at = now
            return
        if full:
            if 0.9 * self.greatest < self.rate:
                self._set(0.9 * self.greatest)
        elif (
            self.rate < 1.5 * self.greatest
        ):  # not without proof; from 16 MB/s on by a constant, so that flows get even
            gain = 0.15 * min((now - self._stepped_at) / max(self.rtt_min, INTERVAL), 1.0)
            self._set(self.rate * (1 + gain * min(32e6 / (self.rate + 16e6), 1.0)))
        self._stepped_at = now


# --- completion ------------------------------------------------------------------------------------------------------
# ``now`` is an argument, in seconds.


@dataclass
class Source:
    """The units of one source, from before the exchange is posted to its end.

    It is over when all units have arrived; or its END has, the reorder window has passed since, and all units are there
    that END says must be; or the deadline has, which counts from the posting. A unit that comes later is late, and is not
    applied. If no more than ``tolerance`` of those that must be there are missing when the window has passed, these are
    lost; else all of them are asked for, and it is over when they are there.
    """

    units: int
    reorder: float
    deadline: float | None = None  # after the posting
    posted_at: float | None = None
    ended_at: float | None = None
    must: frozenset[int] = frozenset()
    tolerance: int = 0
    asked: bool | None = None  # not decided
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
            missing = len(self.must - self.arrived)
            if self.asked is None:
                self.asked = missing > self.tolerance
            self.over |= not (self.asked and missing)
        if self.deadline is not None and now >= self.posted_at + self.deadline:
            self.over = True

    def _look(self) -> None:
        if self.posted_at is not None and len(self.arrived) == self.units:
            self.over = True
