"""The file of ``--island-schedule``: which islands stop, freeze, are cut off, come back and join, and when.

A line is a JSON object ``{"slot": 3, "at": 100, "event": "stop"}``; the event comes before iteration ``at`` (from 0). A
log of such events (:class:`.EpochLog`) is a schedule too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, NamedTuple

from ...base.errors import UsageError, cannot, refuse
from ...config import LossyConfig
from ...config.shipped import find_config

FLAG = "--island-schedule"
_LEAVING = ("stop", "freeze", "cut")
EVENTS = (*_LEAVING, "return", "join")
_FIELDS = ("slot", "at", "event")


class Event(NamedTuple):
    """``at``: the iteration that it comes before."""

    at: int
    slot: int
    event: str

    @property
    def leaves(self) -> bool:
        """Whether the island is no longer there."""
        return self.event in _LEAVING


class Schedule:
    """``events``: in their order; those that leave before those that come, at one iteration."""

    def __init__(self, events: list[Event]) -> None:
        self.events = sorted(events, key=lambda one: (one.at, not one.leaves, one.slot))

    @property
    def empty(self) -> list[int]:
        """The slots that are empty at the beginning."""
        first = {one.slot: one.event for one in reversed(self.events)}
        return sorted(slot for slot, event in first.items() if event == "join")

    def before(self, iteration: int) -> list[Event]:
        """Return the events before ``iteration``."""
        return [one for one in self.events if one.at < iteration]

    def at(self, iteration: int) -> list[Event]:
        """Return the events at ``iteration``."""
        return [one for one in self.events if one.at == iteration]


def check_schedule(config: LossyConfig, iterations: int | None) -> None:
    """Raise :class:`UsageError` for a schedule, if ``config`` has one, that does not fit a run of so many iterations."""
    if config.averages and config.island_schedule is not None:
        read_schedule(config.island_schedule, config.islands, iterations)


def read_schedule(path: str, slots: int, iterations: int | None) -> Schedule:
    """Return the schedule in the file at ``path`` for islands in ``slots`` slots.

    ``iterations``: of the run, if known. Raises :class:`UsageError`, with the file, the line and what is allowed.
    """
    try:
        lines = find_config(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise cannot(FLAG, path, "read", error) from None
    events: list[Event] = []
    places: dict[Event, int] = {}
    for number, line in enumerate(lines, start=1):
        for record in _records(line, path, number):
            event = _event(record, path, number, slots, iterations)
            events.append(event)
            places.setdefault(event, number)
    if not events:
        raise refuse(FLAG, path, f"has no event; must have lines {_example()}")
    schedule = Schedule(events)
    _check_order(schedule, path, places)
    _check_left(schedule, path, slots)
    return schedule


def _example() -> str:
    return json.dumps(dict(zip(_FIELDS, (0, 100, "stop"), strict=True))) + ", with an event of " + ", ".join(EVENTS)


def _wrong(path: str, line: int, why: str) -> UsageError:
    return refuse(FLAG, path, f"line {line}: {why}")


def _records(line: str, path: str, number: int) -> Iterator[Any]:
    """Yield the events in a line: itself, or those of a line of a log."""
    if not line.strip():
        return
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if isinstance(record, dict) and isinstance(record.get("events"), list):
        yield from record["events"]
    elif isinstance(record, dict):
        yield record
    else:
        raise _wrong(path, number, f"{line.strip()[:80]}: must be {_example()}")


def _event(record: Any, path: str, number: int, slots: int, iterations: int | None) -> Event:
    given = record if isinstance(record, dict) else {}
    if unknown := sorted(set(given) ^ set(_FIELDS)):
        what = "is missing" if unknown[0] in _FIELDS else "is unknown"
        raise _wrong(path, number, f"{unknown[0]} {what}; must be {_example()}")
    slot, at, event = (given[name] for name in _FIELDS)
    if not _whole(slot) or not 0 <= slot < slots:
        raise _wrong(path, number, f"slot {slot}: must be in 0 to {slots - 1}; --islands {slots} has no other")
    most = "" if iterations is None else f" and below {iterations}, the iterations of the run"
    if not _whole(at) or at < 0 or (iterations is not None and at >= iterations):
        raise _wrong(path, number, f"at {at}: must be a whole number of at least 0{most}")
    if event not in EVENTS:
        raise _wrong(path, number, f"event {event}: must be one of {', '.join(EVENTS)}")
    return Event(at, slot, event)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_order(schedule: Schedule, path: str, places: dict[Event, int]) -> None:
    """Refuse events that an island cannot have when they come."""
    empty = set(schedule.empty)
    latest: dict[int, Event] = {}
    for one in schedule.events:
        if (before := latest.get(one.slot)) is None:
            allowed = ("join",) if one.slot in empty else _LEAVING
            was = "is empty" if one.slot in empty else "is there"
        elif before.at == one.at:
            raise _wrong(path, places[one], f"event {one.event}: slot {one.slot} has another event at {one.at}")
        else:
            after = {"stop": ("return",), "freeze": ("stop", "return"), "cut": ("stop", "freeze", "return")}
            allowed = after.get(before.event, _LEAVING)
            was = "is there" if not before.leaves else f"has had {before.event} at {before.at}"
        if one.event not in allowed:
            why = f"event {one.event}: slot {one.slot} {was}; must be one of {', '.join(allowed)}"
            raise _wrong(path, places[one], why)
        latest[one.slot] = one


def _check_left(schedule: Schedule, path: str, slots: int) -> None:
    """Refuse a time without an island that is there and was there before: no island would have the model."""
    there = set(range(slots)) - set(schedule.empty)
    for at, events in groupby(schedule.events, key=lambda one: one.at):
        found = list(events)
        there -= {one.slot for one in found if one.leaves}
        if not there:
            raise refuse(FLAG, path, f"leaves no island at iteration {at}; one must stay until others are there")
        there |= {one.slot for one in found if not one.leaves}
