"""A model of ``shared.c``: how fast one process may be sent to on a network that others use.

Loss is ours until it is proven to be the path's: what a path loses does not fall when everybody sends less at once, what a full
queue loses does. At ticks of a clock that all hosts have, flows that lost anything *dip*; what they lose then is the path's, their
``credit``. Other loss is answered as a TCP flow would, by falling, and by growing as Cubic or Reno.

Times are in nanoseconds, rates in bytes/s. Numbers count datagrams.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

MS = 1_000_000
SECOND = 1000 * MS
#: Of the common clock; of a dip: until clocks and queues have settled, and what counts then; its part of the rate.
TICK, SETTLE, DIP, DIPPED = 2 * SECOND, 15 * MS, 50 * MS, 0.4
#: Of sending, from which a decision is made; between steps that double; of a round trip that says that something waits; of a
#: sender that had nothing to send, or slept.
LEAST_WINDOW, ROUND, WAITS, PAUSE = 6 * MS, 25 * MS, MS, 5 * MS
LEAST_RATE, USUAL, BOUND = 30e3, 7.5e6, 3e6
#: Growth relative to TCP's: alone, and next to others; rate left after a loss: on a clean path, on a lossy one.
GROWTH, BESIDE, KEPT, KEPT_LOSSY = 0.8, 1.1, 0.78, 0.92
#: That something must wait, to be drained.
HOLDS = 20 * MS
#: Of what came through once a queue is drained; round trips from then to a search for more.
KEPT_DRAINED, PATIENCE = 0.92, 25


def between(low: float, x: float, high: float) -> float:
    return min(max(low, x), high)


@dataclass
class Look:
    """A report, and the sender's data of its highest number."""

    datagrams: int
    top: int
    sent_at: int
    came: int


@dataclass
class Chain:
    """Losses in a row, none of which came at a rate as high as the first."""

    length: int = 0
    rate: float = 0.0
    delivered: float = 0.0
    sent: float = 0.0
    lost: float = 0.0

    @property
    def suspect(self) -> bool:
        """It fell three times and loses as before: more than flows of its size do to each other, less than any path."""
        if self.length < 3 or self.sent < 30:
            return False
        few = between(0.003, 0.005 * (12.5e6 / self.rate) ** 2, 0.05)
        return few * self.sent <= self.lost <= 0.4 * self.sent


@dataclass
class Shared:
    ceiling: float
    packet: float
    #: Fair to others as so many TCP flows; then those of the rule.
    flows: float = 1.0

    rate: float = field(init=False)
    proven: float = 0.0
    credit: float = 0.0
    share: float = 0.0
    phase: str = "starts"
    competes: bool = False

    def __post_init__(self) -> None:
        self.flows **= 0.6
        self.floor = min(LEAST_RATE, self.ceiling)
        self._set(10 * self.packet / 0.01)
        self._drains = 0
        self._rtt = self._srtt = 0
        self._slots: list[float] = [float("inf"), float("inf")]
        self._slot_at = 0
        self._base: Look | None = None
        self._last: Look | None = None
        self._mark: float = 0
        self._least: float = float("inf")
        self._came, self._took = 0, 0
        self._calm_at = self._queued_at = 0
        self._before = self._step = self._grew = self._drained = 0.0
        self._chain = Chain()
        self._counts = self._ends = self._ended = 0
        self._dip_rate = 0.0
        self._tick = -1
        self._pool = [0.0, 0.0]  # sent and lost in dips
        self._lost_any = False

    def _set(self, rate: float) -> None:
        self.rate = between(self.floor, rate, self.ceiling)

    # --- its state ---

    @property
    def _trip(self) -> int:
        return self._srtt or 10 * MS

    @property
    def _queue(self) -> float:
        return 0 if self._least == float("inf") else self._least - self._rtt

    @property
    def _lossy(self) -> bool:
        return self.credit >= 0.005

    @staticmethod
    def _starts_excess(sent: float, lost: float) -> bool:
        return lost > 0.05 * sent + 3 * sqrt(0.4 * sent)

    def _excess(self, sent: float, lost: float) -> bool:
        chance = 0.001 if self._queue > WAITS else between(0.001, 0.005 * sqrt(self.rate / 12.5e6), 0.01)
        share = max(self.credit, chance)
        known = 1 + sent / self._pool[0] if self._lossy else 1
        return lost > share * sent + 3.5 * sqrt(share * (1 - share) * sent * known) + 0.5

    def _epochs(self) -> tuple[float, float]:
        """Seconds in which a Reno and a Cubic flow, one of ``flows``, would get back what it gives after a loss."""
        trip, each = self._trip / 1e9, self.rate / self.flows
        return 0.3 / 0.53 * each * trip * trip / self.packet, (0.75 * each * trip / self.packet) ** (1 / 3)

    def _kept(self, share: float) -> float:
        """Return the rest of ``flows`` after one of them keeps ``share``."""
        return 1 - (1 - share) / self.flows

    def _growth(self) -> float:
        tcp = 0.3 * self.rate / min(self._epochs())
        if self.competes:
            return BESIDE * tcp
        size = self.rate / self.flows / USUAL
        return min(GROWTH * tcp, self.flows * BOUND * (size if size < 1 else sqrt(size)))

    def _patient(self) -> bool:
        reno, cubic = self._epochs()
        wait = min(0.4 * reno, 0.65 * cubic, PATIENCE * self._trip / 1e9 if self._drained else float("inf"))
        return self.rate >= self.proven or self._step > 0 or self._grew > wait

    # --- windows ---

    def _later(self, mark: float) -> None:
        """A window of what is sent from then on."""
        self._mark = mark
        self._base, self._least = None, float("inf")

    def _next(self) -> None:
        self._base, self._least = self._last, float("inf")
        self._came, self._took = 0, 0

    def _delivered(self, unknown: float) -> float:
        """Return bytes/s that came in this window."""
        return self._came * self.packet * 1e9 / self._took if self._took >= LEAST_WINDOW // 2 else unknown

    def sample(self, now: int, rtt: int) -> None:
        """A round trip took ``rtt``."""
        rtt = max(rtt, 1)
        if not self._srtt:
            self._slot_at = now
        elif now - self._slot_at >= 3 * SECOND:
            self._slots = [float("inf"), self._slots[0]]
            self._slot_at = now
        self._slots[0] = min(self._slots[0], rtt)
        self._rtt = int(min(self._slots))
        difference = rtt - self._srtt
        eighth = abs(difference) // 8  # as C divides
        self._srtt = self._srtt + (eighth if difference > 0 else -eighth) if self._srtt else rtt
        self._least = min(self._least, rtt)

    def report(self, now: int, datagrams: int, top: int, sent_at: int, came: int) -> None:
        """``datagrams`` came, up to ``top`` - 1, which was sent and came then."""
        last, self_base = self._last, self._base
        if last is not None and (datagrams <= last.datagrams or top < last.top):
            return
        if last is not None and self_base is not None:
            sent = top - last.top
            if sent_at - last.sent_at < int(2e9 * sent * self.packet / self.rate) + PAUSE:
                self._came += datagrams - last.datagrams
                self._took += came - last.came
            if self.phase == "grows" and self._chain.length:
                self._chain.sent += sent
                self._chain.lost += max(sent - (datagrams - last.datagrams), 0)
        self._last = Look(datagrams, top, sent_at, came)
        if self_base is None:
            if sent_at >= self._mark:
                self._next()
            return
        sent = top - self_base.top
        lost = max(sent - (datagrams - self_base.datagrams), 0)
        if sent < 2:
            return
        if self.phase == "dips":
            if self._ended and sent_at >= self._ended:
                self.phase = "grows"
                self._dip_over(sent, lost)
                self._later(now)
            return
        passed = int(sent * self.packet * 1e9 / self.rate)
        if self.phase != "starts" and passed >= LEAST_WINDOW and self._excess(sent, lost):
            self._fall(now, sent, lost)
            return
        wanted = max(self._rtt // 4, LEAST_WINDOW)
        enough = 8 if self.phase == "starts" else 4000 * self.credit if self._lossy else 2
        if sent >= min(enough, 0.3 * self.rate / self.packet) and passed >= wanted:
            self._window_over(now, passed, sent, lost)

    # --- decisions ---

    def _fall(self, now: int, sent: float, lost: float) -> None:
        share = lost / (100 if lost < 4 and sent < 100 else sent)
        delivered = self.rate * (1 - share)
        if sent >= 100:
            delivered = self._delivered(delivered)
        delivered = between(self.rate / 4, delivered / (1 - self.credit), self.rate)
        chain = self._chain
        if chain.length and self.rate < 0.97 * chain.rate:
            chain.length += 1
        else:
            self._chain = chain = Chain(1, self.rate, self.rate * (1 - share))
        self._step = self._grew = self._drained = 0.0
        self.phase = "grows"
        self._lost_any = True
        self._later(now)
        hold = DIPPED * chain.delivered
        if chain.suspect and self.rate <= hold:
            return  # until a dip has shown whose loss that is
        rate = min(self.rate * self._kept(KEPT_LOSSY if self._lossy else KEPT), self._kept(0.95) * delivered)
        if self.share > 0 and not chain.suspect:
            rate += 0.5 * (between(rate / 4, self._kept(KEPT) * self.share / (1 - self.credit), 2 * rate) - rate)
        self.proven = delivered
        self._set(max(rate, hold) if chain.suspect else rate)

    def _dip_over(self, sent: float, lost: float) -> None:
        chain, was = self._chain, self.credit
        off = lost - was * sent
        known = 0.9
        if off * off >= 6.25 * (was * (1 - was) * sent + 0.25):
            known = 0.1 if off < 0 else 0.3
        self._pool = [known * self._pool[0] + sent, known * self._pool[1] + lost]
        held = chain.suspect
        share = chain.lost / chain.sent if held else 0.0
        due = share * self._pool[0]
        if held and was == 0 and due >= 6 and self._pool[1] > 0.6 * due:
            self._pool = [self._pool[0] + chain.sent, self._pool[1] + chain.lost]
        self.credit = between(0, self._pool[1] / (self._pool[0] + 30), 0.3)
        if self.credit < 0.003 or self._pool[1] < 3:
            self.credit = 0.0
        if held and self.credit > was:
            self.proven = min(chain.delivered / (1 - self.credit), chain.rate)
            self._set(self.proven * KEPT_LOSSY)
        unsure = (share < 0.02 or self._pool[1] > 0.3 * due) if due < 6 else due < 24 and self._pool[1] > 0.2 * due
        self._lost_any = held and self.credit == 0 and unsure
        if not self._lost_any:
            chain.length = 0

    def clock(self, now: int, clock: int) -> None:
        """Before something is sent; ``clock``: that all hosts have."""
        if self.phase == "dips":
            if self._counts and now >= self._counts:
                self._counts = 0
                self._later(now)
            if self._ends and now >= self._ends:
                self._ended, self._ends = now, 0
                self._set(self._dip_rate)
            return
        tick = clock // TICK
        if tick == self._tick:
            return
        first, self._tick = self._tick < 0, tick
        late = clock % TICK > SETTLE
        if first or late or self.phase == "starts" or not (self._lost_any or self.credit > 0):
            return
        self._dip_rate = self.rate
        self._counts = now + SETTLE
        self._ends = self._counts + max(self._trip // 2, DIP)
        self._ended = 0
        self.phase = "dips"
        self._set(DIPPED * min(self.rate, self.proven))
        self._later(float("inf"))

    def _window_over(self, now: int, passed: int, sent: float, lost: float) -> None:
        queued = self._queue > max(4 * MS, self._rtt // 8)
        if self.phase == "starts":
            if not self._starts_excess(sent, lost) and not queued:
                self.proven = self.rate
                self._set(2 * self.rate)
                self._later(now)
                return
            self.phase = "grows"
            self.proven = min(self._delivered(self.rate), self.rate)
            if lost > 0:
                self._fall(now, sent, lost)
            else:
                self._set(0.8 * self.proven)
                self._later(now)
            return
        self._calm_at = 0 if queued else self._calm_at or now
        if self.competes and self._calm_at and now - self._calm_at > 2 * SECOND:
            self.competes, self._drains = False, 0
        if queued and not self.competes:
            if self._queued_at and now - self._queued_at >= HOLDS:
                self._queued_at = 0
                self._drain(now, sent)
            else:
                self._queued_at = self._queued_at or now
                self._next()
            return
        self._queued_at = 0
        if not self.competes and self._drains:
            self._drains = 0
            if self.rate < self._drained:
                self._set(self._drained)
                self._later(now)
                return
        if self._chain.length and lost == 0 and self.rate >= 0.97 * self._chain.rate:
            self._chain.length = 0
        if self._patient() and not self.competes:
            if passed < ROUND:
                return
            most = self.rate / 32 if self.rate < 1.25 * self.proven else self.rate / 2
            self._step = min(2 * self._step if self._step > 0 else self.rate / 64, most)
            self._set(self.rate + self._step)
            self._later(now)
            return
        self._set(self.rate + self._growth() * passed / 1e9)
        self._grew += passed / 1e9
        self._next()

    def _drain(self, now: int, sent: float) -> None:
        rate = self._delivered(self.rate) / (1 - self.credit)
        if not self._drains:
            self._before = max(self.rate, self.proven)
        if sent >= 32 and rate <= 0.85 * self.rate:
            self.proven = self._before = rate
        if self._drains >= 2:
            self.competes = True
            self.proven = self._before
            self._drained = 0.0
            self._set(0.95 * self.proven)
        else:
            through = min(self.rate, self.proven)
            if not self._drains:
                self._drained = KEPT_DRAINED * through
            self._set((0.5 if self._queue > self._rtt // 2 + 10 * MS else 0.85) * through)
        self._drains += 1
        self._step = self._grew = 0.0
        self._later(now)
