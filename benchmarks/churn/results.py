"""Tables of a run with islands that come and go: presence, updates, pauses, losses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from benchmarks.churn.islands import Life
from benchmarks.churn.schedule import DONE, PastEvent, describe
from megatron_lossy.mechanisms.islands.monitor import EPOCHS

#: With more events than these, the table lists kinds.
_MANY = 40
#: The first iterations of a life warm up: their pauses do not count.
_WARM = 3
AWAY, ALONE, LISTENS, SENDS = "away", "in no exchange with others", "listens", "sends"


class Span(NamedTuple):
    """An island was ``state`` in the iterations of the run from ``first`` to ``last``, without it."""

    first: int
    last: int
    state: str


@dataclass(frozen=True)
class Island:
    """One island over all of its lives. ``epochs``: the lines of its log of epochs."""

    slot: int
    lives: Sequence[Life]
    epochs: Sequence[dict[str, Any]]

    @classmethod
    def read(cls, slot: int, lives: Sequence[Life], log: Path) -> Island:
        path = log / f"island_{slot}" / EPOCHS
        lines = path.read_text().splitlines() if path.exists() else []
        return cls(slot, [life for life in lives if life.slot == slot], [json.loads(line) for line in lines])

    def of_kind(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield its records of a kind, of all lives."""
        return (record for life in self.lives for record in life.records if record["kind"] == kind)

    @property
    def made(self) -> list[int]:
        """The iterations that it has made; more than once if it has gone back to a checkpoint."""
        return [record["iteration"] for record in self.of_kind("train")]

    @property
    def losses(self) -> dict[int, float]:
        """Its training losses."""
        return {record["iteration"]: record["lm loss"] for record in self.of_kind("train")}

    @property
    def valid(self) -> dict[int, float]:
        """Its validation losses."""
        return {record["iteration"]: record["lm loss"] for record in self.of_kind("valid")}

    @property
    def lost(self) -> int:
        """Exchanges that it has begun, and of which nothing arrived."""
        return sum(len(line["lost"]) for line in self.epochs)

    def begun(self, interval: int) -> int:
        """Return the number of exchanges that it has begun: one after every ``interval`` iterations of the run."""
        return sum(iteration % interval == 0 for iteration in self.made)

    @property
    def spans(self) -> list[Span]:
        """Return the phases in the order of the run, from its iterations and from the epochs that it recorded."""
        states = [self._state(line) for line in self.epochs]
        found: list[Span] = []
        for first, last in _runs(sorted(set(self.made))):
            edges = [first, *sorted({line["t"] - 1 for line in self.epochs if first < line["t"] - 1 < last}), last]
            for begin, end in itertools.pairwise(edges):
                known = [state for line, state in zip(self.epochs, states) if line["t"] - 1 <= begin]
                state = (known or states or [ALONE])[-1 if known else 0]
                if found and found[-1].state == state and found[-1].last == begin:
                    found[-1] = Span(found[-1].first, end, state)
                else:
                    found.append(Span(begin, end, state))
        return found

    def _state(self, line: dict[str, Any]) -> str:
        roles = dict(zip((slot for slot, _ in line["members"]), line["roles"], strict=True))
        if self.slot not in roles or len(roles) == 1:
            return ALONE
        return SENDS if roles[self.slot] == "send" else LISTENS

    def possible(self, happened: Sequence[PastEvent], end: int) -> int:
        """Return the possible updates: iterations of the run while its process was there and not frozen, or made ones.

        ``end``: iterations of the run. A life begins when it has entered the run, once it has its checkpoint. Events are known to a few
        iterations.
        """
        own = [event for event in happened if event.slot == self.slot]
        ends = [*(event.at for event in own if event.event == "stop"), end]
        there = sum(
            max(0, last - life.trained[0]["iteration"] + 1) for life, last in zip(self.lives, ends) if life.trained
        )
        stood = sum(
            then.at - event.at for event, then in zip(own, [*own[1:], None]) if event.event == "freeze" and then
        )
        return max(there - stood, len(set(self.made)))

    @property
    def left_out(self) -> int:
        """Iterations that a life of it has left out since its first one."""
        return sum(
            max(0, later - earlier - 1)
            for life in self.lives
            for earlier, later in itertools.pairwise(record["iteration"] for record in life.trained)
        )

    @property
    def made_twice(self) -> int:
        """Iterations that it has made more than once."""
        return len(self.made) - len(set(self.made))

    def pauses(self) -> list[tuple[float, float]]:
        """Return the end and the duration of each of its iterations, in seconds."""
        return [
            (life.seen[record["iteration"]], record["seconds"])
            for life in self.lives
            for record in life.trained[_WARM:]
            if record["iteration"] in life.seen
        ]


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first minus one, and the last, of each run of consecutive ``numbers``."""
    first = None
    for place, number in enumerate(numbers):
        first = number if first is None else first
        if place + 1 == len(numbers) or numbers[place + 1] != number + 1:
            yield first - 1, number
            first = None


@dataclass(frozen=True)
class Results:
    """``happened``: in its order. ``end``: iterations of the run. ``notes``: what else is to be said. ``interval``: see :meth:`Island.begun`."""

    islands: Sequence[Island]
    happened: Sequence[PastEvent]
    end: int
    notes: Sequence[str] = ()
    interval: int = 1

    @property
    def updates(self) -> int:
        """Updates and exchanges of all islands together, each once."""
        return sum(len(set(island.made)) for island in self.islands)

    @property
    def goodput(self) -> float:
        """Updates made of those possible, of all islands."""
        possible = sum(island.possible(self.happened, self.end) for island in self.islands)
        return self.updates / max(possible, 1)

    @property
    def valid(self) -> float:
        """Mean over the islands of the validation loss of their own weights at the end of the run."""
        return fmean(island.valid[self.end] for island in self.islands if self.end in island.valid)

    @property
    def arrived(self) -> float:
        """Share of the exchanges of all islands of which something arrived."""
        begun = sum(island.begun(self.interval) for island in self.islands)
        return 1 - sum(island.lost for island in self.islands) / max(begun, 1)

    def headline(self) -> str:
        """Return both shares in words: of updates that were made, and of exchanges that arrived."""
        return f"{100 * self.goodput:.1f} % of the possible updates made; of {100 * self.arrived:.1f} % of the exchanges something arrived"

    def whole(self) -> str:
        """Return a sentence about the samples that were left out, or read twice."""
        hit = {event.slot for event in self.happened if event.event in ("freeze", "cut")}
        left = sum(island.left_out for island in self.islands if island.slot not in hit)
        twice = sum(island.made_twice for island in self.islands)
        return f"Iterations that an island left out while it was there, and neither frozen nor cut off: {left}; made twice: {twice}."

    def survivors(self, number: int) -> list[Island]:
        """Return the islands that event ``number`` did not hit, nor any before it that is not over."""
        hit: set[int] = set()
        for event in self.happened[: number + 1]:
            (hit.discard if event.event in ("return", "join") else hit.add)(event.slot)
        hit.add(self.happened[number].slot)
        return [island for island in self.islands if island.slot not in hit]

    def longest_pause(self, number: int) -> float | None:
        """Return the longest iteration (s) of a survivor from event ``number`` to the next; ``None`` without any."""
        begin = self.happened[number].when
        end = self.happened[number + 1].when if number + 1 < len(self.happened) else float("inf")
        found = [took for island in self.survivors(number) for at, took in island.pauses() if begin <= at < end]
        return max(found, default=None)

    def usual(self) -> float:
        """Return median seconds of an iteration."""
        times = sorted(took for island in self.islands for _, took in island.pauses())
        return times[len(times) // 2] if times else 0.0

    def events(self) -> list[list[str]]:
        """Return rows of cells, the first of them the head: an event each, or a kind of event if there are many."""
        if len(self.happened) > _MANY:
            return self._kinds()
        rows = [["iteration", "event", "longest iteration of a survivor until the next event (s)"]]
        for number, event in enumerate(self.happened):
            rows.append([str(event.at), describe(event.slot, event.event), _seconds(self.longest_pause(number))])
        return rows

    def _kinds(self) -> list[list[str]]:
        rows = [["events", "number", "longest iteration of a survivor until the next event (s): median", "most"]]
        for kind in dict.fromkeys(event.event for event in self.happened):
            found = [self.longest_pause(number) for number, event in enumerate(self.happened) if event.event == kind]
            known = sorted(pause for pause in found if pause is not None) or [None]
            rows.append([DONE[kind], str(len(found)), _seconds(known[len(known) // 2]), _seconds(known[-1])])
        return rows

    def table(self) -> list[list[str]]:
        """Return rows of cells, the first of them the head."""
        head = ["", "starts", "updates made", "of those possible", "exchanges that arrived"]
        rows = [[*head, "training loss, last 20", "validation loss"]]
        for island in self.islands:
            made, possible = len(set(island.made)), island.possible(self.happened, self.end)
            losses, valid = list(island.losses.values())[-20:], island.valid
            rows.append(
                [
                    f"island {island.slot}",
                    str(len(island.lives)),
                    str(made),
                    f"{100 * made / max(possible, 1):.1f} %",
                    f"{100 * (1 - island.lost / max(island.begun(self.interval), 1)):.1f} %",
                    f"{sum(losses) / max(len(losses), 1):.3f}",
                    f"{valid[max(valid)]:.3f}" if valid else "",
                ]
            )
        return rows


def _seconds(pause: float | None) -> str:
    return "-" if pause is None else f"{pause:.2f}"


def compared(seeds: Sequence[int], pairs: Sequence[tuple[Results, Results]]) -> list[str]:
    """Return a table of final validation losses. ``pairs``: by seed, the run with the events, and the other."""
    rows = [["seed", "updates", "validation loss", "undisturbed, as many updates", "difference"]]
    changes = [100 * (hit.valid / fine.valid - 1) for hit, fine in pairs]
    for seed, (hit, fine), change in zip(seeds, pairs, changes, strict=True):
        updates = f"{hit.updates} and {fine.updates}"
        rows.append([str(seed), updates, f"{hit.valid:.4f}", f"{fine.valid:.4f}", f"{change:+.2f} %"])
    if len(pairs) > 1:
        error = stdev(changes) / len(changes) ** 0.5
        rows.append(["mean, standard error", "", "", "", f"{fmean(changes):+.2f} ± {error:.2f} %"])
    return markdown(rows)


def markdown(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return ``rows`` as a table."""
    head, *body = rows
    return [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
