"""The values that islands write into the store: one JSON object each.

More fields than are known are ignored, so that a newer version can add some. A value with less, or of another form, is none.
The functions at the end compare members by their beats.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any, TypeVar

#: The slot of an island and a random name of its process: ``2/1a2b3c4d``.
Member = str
Members = tuple[str, ...]
_MEMBER = re.compile(r"\d{1,3}/[0-9a-f]{8}")
_MOST = 1 << 53
#: The checks by the type of a field.
_CHECKS = {
    "int": lambda value: type(value) is int and 0 <= value < _MOST,
    "Slots": lambda value: type(value) is int and 0 <= value < 1 << 1000,
    "float": lambda value: type(value) in (int, float) and math.isfinite(value),
    "str": lambda value: type(value) is str and len(value) <= 200,
    "Member": lambda value: type(value) is str and _MEMBER.fullmatch(value) is not None,
    "Members": lambda value: (
        type(value) is list
        and all(map(_CHECKS["Member"], value))
        and len({slot_of(member) for member in value}) == len(value)
    ),
}
_T = TypeVar("_T")


def slot_of(member: Member) -> int:
    """Return its slot."""
    return int(member.partition("/")[0])


class Slots(int):
    """A set of slots, as bits."""

    @classmethod
    def of(cls, members: Iterable[Member]) -> Slots:
        return cls(sum(1 << slot for slot in {slot_of(member) for member in members}))

    def __contains__(self, member: Member) -> bool:
        return bool(int(self) >> slot_of(member) & 1)


NOBODY = Slots(0)
#: By the type of a field, what makes it of a value in JSON.
_CONVERTED = {"Members": tuple, "Slots": Slots}


@dataclass(frozen=True)
class Birth:
    """The name of a store, written once. ``time``: Unix seconds."""

    nonce: str
    time: int


@dataclass(frozen=True)
class Slot:
    """Its holder. ``flags``: digest of those that islands must share. ``address``: where it listens, HOST:PORT. ``machine``: where it runs."""

    me: Member
    host: str
    address: str
    flags: str
    machine: str = ""


@dataclass(frozen=True)
class Beat:
    """The state of an island, each second.

    ``entry``: hash of the newest that it has. ``role``: waits, copies, sends, leaves. ``seconds``: per exchange. ``received``: within
    the time of silence. ``attempt``: the nonce of the preparation that it connects for, and with whom it is ``ready``. ``yields``: to
    a branch that brings more. ``loss`` and ``event`` are for operators, and so is ``lost``, the share of messages that did not come.
    """

    me: Member
    count: int
    role: str
    iteration: int
    exchange: int
    entry: str = ""
    seconds: float = 1.0
    lag: int = 0
    received: Slots = NOBODY
    attempt: str = ""
    ready: Slots = NOBODY
    yields: int = 0
    loss: float = 0.0
    lost: float = 0.0
    event: str = ""


@dataclass(frozen=True)
class Preparation:
    """An attempt at the entry of ``number``: the candidates connect to each other."""

    number: int
    by: Member
    nonce: str
    candidates: Members


@dataclass(frozen=True)
class Entry:
    """An epoch, from exchange ``first`` on, when the run has made ``iteration`` iterations.

    A member that is no sender copies, or listens. ``parent``: hash of the entry before it, empty for the first. ``nonce``: of its
    preparation, which names the connections that its members have made.
    """

    number: int
    members: Members
    senders: Members
    first: int
    iteration: int
    parent: str
    nonce: str

    def __post_init__(self) -> None:
        if not self.senders or not set(self.senders) <= set(self.members):
            raise ValueError("senders that are no members, or none")

    @cached_property
    def ident(self) -> str:
        """Its hash: 16 hexadecimal digits."""
        return hashlib.blake2b(write(self).encode(), digest_size=8).hexdigest()


def write(message: Any) -> str:
    """Return its text; equal messages have equal texts."""
    values = {field.name: getattr(message, field.name) for field in fields(message)}
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


@lru_cache(maxsize=1024)
def read(cls: type[_T], text: str | None) -> _T | None:
    """Return the message in ``text``; ``None`` if that is none of ``cls``."""
    try:
        found = json.loads(text or "")
        values = {}
        for field in fields(cls):  # type: ignore[arg-type]
            value = found[field.name]
            if not _CHECKS[str(field.type)](value):
                return None
            convert = _CONVERTED.get(str(field.type))
            values[field.name] = value if convert is None else convert(value)
        return cls(**values)
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


class Picture:
    """The messages in the store. ``skipped``: values that are no messages."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.skipped = 0
        self.birth = self._take(Birth, "birth")
        self.entry = self._take(Entry, "epoch")
        self.prepared = self._take(Preparation, "prepare")
        self.slots = self._of_slots(Slot, "slot")
        self.beats = {beat.me: beat for beat in self._of_slots(Beat, "beat").values()}

    def _take(self, cls: type[_T], key: str) -> _T | None:
        found = read(cls, self.texts.get(key))
        self.skipped += found is None and key in self.texts
        return found

    def _of_slots(self, cls: type[_T], name: str) -> dict[int, _T]:
        found = {key: self._take(cls, key) for key in self.texts if key.startswith(f"{name}/")}
        return {slot_of(held.me): held for key, held in found.items() if held and key == f"{name}/{slot_of(held.me)}"}


def stands(wanted: Sequence[Member], live: Mapping[Member, Beat], base: Entry | None, last: Entry | None) -> bool:
    """Return whether ``base`` is the newest entry, and has the right members already, and all that may send."""
    if base is None or last is None or last.ident != base.ident:
        return False
    may_send = {me for me in wanted if live[me].role == "sends" and live[me].entry == base.ident}
    return set(wanted) == set(base.members) and may_send <= set(base.senders)


def branches_of(live: Mapping[Member, Beat]) -> dict[str, list[Member]]:
    """Return the live islands, by the entry that they have. One that never sent does not count while a sender lives."""
    voters = {me: beat for me, beat in live.items() if beat.entry}
    voters = {me: beat for me, beat in voters.items() if beat.role == "sends"} or voters
    found: dict[str, list[Member]] = {}
    for me, beat in voters.items():
        found.setdefault(beat.entry, []).append(me)
    return found


def weight(branch: Sequence[Member], live: Mapping[Member, Beat], ident: str) -> tuple[object, ...]:
    """Return the key that orders branches: those that do not yield, that have more receiving senders, and then islands, win."""

    def receives(me: Member, others: Collection[Member]) -> bool:
        return any(other in live[me].received for other in others if other != me)

    senders = sum(receives(me, branch) for me in branch)
    there = [me for me, beat in live.items() if beat.entry == ident]
    company = sum(receives(me, there) for me in there)
    most = max(live[me].iteration for me in branch)
    return not any(live[me].yields for me in branch), senders, company, len(branch), most, ident


def connected(wanted: Members, ready: Mapping[Member, Slots], keep: Collection[Member]) -> Members:
    """Return those of ``wanted`` of which every pair is connected: the one that lacks most pairs goes, of ``keep`` last."""
    members = list(wanted)

    def lacks(me: Member) -> int:
        others = [other for other in members if other != me]
        return sum(other not in ready.get(me, NOBODY) or me not in ready.get(other, NOBODY) for other in others)

    while lacks(worst := max(members, key=lambda me: (lacks(me), me not in keep, slot_of(me)))):
        members.remove(worst)
    return tuple(members)
