"""The schedule of a run: events of islands as those of ``--island-schedule``, and those of the coordinator."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from benchmarks.churn.islands import Islands
from megatron_lossy.lab.virtual.island_schedule import Event, Schedule

COORDINATOR = -1
#: By event of a schedule what is done.
DONE = {
    "stop": "kill -9",
    "freeze": "SIGSTOP",
    "cut": "cut off",
    "return": "there again",
    "join": "new",
}
#: Of 1200 iterations: one dies and comes back, one is new, one is frozen, one is cut off, one dies while the coordinator is away.
DEFAULT = Schedule(
    [
        Event(120, 1, "stop"),
        Event(230, 1, "return"),
        Event(310, 3, "join"),
        Event(430, 2, "freeze"),
        Event(510, 2, "return"),
        Event(590, 0, "cut"),
        Event(690, 0, "return"),
        Event(810, 3, "stop"),
        Event(950, 3, "return"),
    ]
)
DEFAULT_AWAY = (770, 900)


class PastEvent(NamedTuple):
    """An event that has happened. ``at``: the iteration of the run. ``slot``: of an island, or of the coordinator. ``when``: in seconds."""

    at: int
    slot: int
    event: str
    when: float


class Events(Protocol):
    """Source of events. ``happened``: past events, in their order."""

    happened: list[PastEvent]

    def direct(self) -> None:
        """Make everything happen that is due."""


@dataclass
class Director:
    """Makes the events of ``schedule`` happen, and those of the coordinator, which is away in the iterations ``away``, if any."""

    islands: Islands
    schedule: Schedule
    away: tuple[int, int] | None
    tell: Callable[[str], None] = print

    def __post_init__(self) -> None:
        away = (
            []
            if self.away is None
            else [Event(self.away[0], COORDINATOR, "stop"), Event(self.away[1], COORDINATOR, "return")]
        )
        self._left = sorted([*self.schedule.events, *away], key=lambda event: (event.at, not event.leaves, event.slot))
        self.happened: list[PastEvent] = []

    def direct(self) -> None:
        """Make everything happen that is due."""
        now = self.islands.iteration
        while self._left and self._left[0].at <= now:
            event = self._left.pop(0)
            self._do(event)
            self.happened.append(PastEvent(now, event.slot, event.event, time.monotonic()))
            self.tell(f"iteration {now:5d}: {describe(event.slot, event.event)}")

    def _do(self, event: Event) -> None:
        islands, slot = self.islands, event.slot
        if slot == COORDINATOR:
            islands.stop_serving() if event.leaves else islands.serve()
        elif event.event == "cut":
            islands.cut(slot, there=False)
        elif event.leaves:
            islands.signal(slot, signal.SIGKILL if event.event == "stop" else signal.SIGSTOP)
        else:
            self._bring_back(slot, event.event == "join")

    def _bring_back(self, slot: int, new: bool) -> None:
        islands = self.islands
        life = None if new else islands.latest(slot)
        if life is not None and life.cut:
            islands.cut(slot, there=True)
        if life is None or not life.runs:
            islands.start(slot)
        elif life.frozen:
            islands.signal(slot, signal.SIGCONT)


@dataclass
class Kills:
    """Kills an island that trains, drawn by ``seed``, every ``every`` seconds, and starts it at once, until the run has made ``end`` iterations.

    ``most``: kills, after which all islands stop; ``None``: as many as there are.
    """

    islands: Islands
    every: float
    end: int
    seed: int
    most: int | None = None
    tell: Callable[[str], None] = print

    def __post_init__(self) -> None:
        self._drawn = random.Random(self.seed)
        self._next = 0.0
        self.happened: list[PastEvent] = []

    def direct(self) -> None:
        """Make everything happen that is due. The first kill follows the first iterations of all."""
        islands, now = self.islands, self.islands.iteration
        training = [life for life in islands.running() if life.trained]
        if not self._next and len(training) == len(islands.lives):
            self._next = time.monotonic() + self.every
        if not self._next or time.monotonic() < self._next or now >= self.end or not training:
            return
        if len(self.happened) // 2 == self.most:
            if len(training) == len(list(islands.running())):  # one that is about to train could not save
                self._next = math.inf
                for life in training:
                    islands.signal(life.slot, signal.SIGTERM)
            return
        self._next += self.every
        slot = self._drawn.choice(training).slot
        islands.signal(slot, signal.SIGKILL)
        self.happened.append(PastEvent(now, slot, "stop", time.monotonic()))
        islands.start(slot)
        self.happened.append(PastEvent(now, slot, "return", time.monotonic()))
        self.tell(f"iteration {now:5d}: {len(self.happened) // 2:3d}. island {slot} {DONE['stop']}, and started again")


def describe(slot: int, event: str) -> str:
    """Return an event in words."""
    return f"{'coordinator' if slot == COORDINATOR else f'island {slot}'} {DONE[event]}"


def without_cuts(schedule: Schedule) -> Schedule:
    """Return ``schedule`` without cuts."""
    cut: set[int] = set()
    kept = []
    for event in schedule.events:
        if event.event == "cut":
            cut.add(event.slot)
            continue
        if event.event != "return" or event.slot not in cut:
            kept.append(event)
        cut.discard(event.slot)
    return Schedule(kept)


def first_islands(schedule: Schedule, slots: int) -> Sequence[int]:
    """Return the islands that are there at the beginning."""
    return [slot for slot in range(slots) if slot not in schedule.empty]
