"""The rules by which islands agree on who is there, for one island: without a clock, a store or a network.

An island polls: it reads what is in the store, and gets what it is to write, whom to connect to, and what has become of it. Keys
are ``birth``, ``flags``, ``slot/I``, ``beat/I``, ``prepare`` and ``epoch``. The last holds the newest entry of the list of epochs:
an entry replaces its predecessor by compare-and-swap, so that none is written twice, and names it by its hash. Entries that are written
without an answer are read at the next poll.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any, NamedTuple

from . import messages
from .messages import NOBODY, Beat, Birth, Entry, Member, Members, Picture, Preparation, Slot, Slots, slot_of, write

#: An answer that differs from every text: the write asks for no former value.
ANY = object()
#: Polls after which a beat that has not moved is late.
_LATE = 3


@dataclass(frozen=True)
class Times:
    """Seconds: between polls; until a silent island counts as dead; for candidates to connect; in which a new store is filled again
    (``quiet``); until less than half of the senders go on without the others (``alone``), and the first island begins (``join``);
    until an island that was left out is tried again, doubled each time up to a most; in which an entry is read by all.
    """

    poll: float = 1.0
    silent: float = 10.0
    connect: float = 6.0
    quiet: float = 20.0
    alone: float = 60.0
    join: float = 60.0
    again: float = 30.0
    most_again: float = 600.0
    read: float = 3.0


@dataclass(frozen=True)
class Local:
    """The state of this island that no store has.

    ``unix``: seconds, of a clock that may be wrong. ``iteration`` and ``exchange``: made so far; ``interval`` iterations make an
    exchange, which takes ``seconds``. ``ready``: its weights are the run's, and may be sent. ``leaves``: it is about to end. ``received``:
    members whose frames have come within the time of silence. ``connected``: candidates of the preparation ``attempt`` to which a
    connection stands. ``answers``: whether the holder of this island's slot answers at its address; ``None``: not known. ``gone``: the
    holder, if it was a process of this machine that has ended. ``shown``: fields of a :class:`Beat` for operators.
    """

    unix: float
    iteration: int = 0
    exchange: int = 0
    interval: int = 1
    seconds: float = 1.0
    ready: bool = False
    leaves: bool = False
    received: Collection[Member] = ()
    attempt: str = ""
    connected: Collection[Member] = ()
    answers: bool | None = None
    gone: Member = ""
    shown: Mapping[str, Any] = field(default_factory=dict)


class Write(NamedTuple):
    """``old``: the text that is there, ``None`` for none; :data:`ANY`: whatever it is."""

    key: str
    new: str
    old: object = ANY


@dataclass
class Plan:
    """``writes`` in their order, of which the rest is left out once one fails. ``connect``: to these, of attempt ``attempt``.

    ``ask``: a holder, which may be alive. ``refused`` and ``lost``: the line with which this island ends, before it
    held its slot or afterwards; ``flags``: those of the run, if that is why. ``run``: the exchanges that the median of the other senders
    has made, each in ``seconds``; ``None``: there are none. ``lines``: for the log.
    """

    writes: list[Write] = field(default_factory=list)
    connect: Members = ()
    attempt: str = ""
    ask: Slot | None = None
    refused: str | None = None
    lost: str | None = None
    flags: str = ""
    run: int | None = None
    seconds: float = 1.0
    lines: list[str] = field(default_factory=list)


@dataclass
class _Seen:
    """An island by its beats. ``silence``: seconds of this one's own polls in which the counter did not move."""

    count: int
    silence: float = 0.0
    moved: bool = False


class Island:
    """The rules of one of ``islands`` slots, which ``own`` describes.

    :attr:`entry` is the newest that names it; exchanges before its first are made under the one before, and an island far from that goes on
    at it, with the weights that it has. :attr:`role`: waits for an entry, copies, or sends. :attr:`holds`: whether its slot is its own.
    ``draw``: random hexadecimal text of so many bytes.
    """

    def __init__(
        self, own: Slot, islands: int, times: Times, now: float, draw: Callable[[int], str] = secrets.token_hex
    ) -> None:
        self.own, self.me, self.slot = own, own.me, slot_of(own.me)
        self.times = times
        self.entry: Entry | None = None
        self.holds = False
        self._islands, self._began, self._draw = islands, now, draw
        self._birth: str | None = None
        self._quiet = math.inf
        self._polled: float | None = None
        self._seen: dict[Member, _Seen] = {}
        self._count = 0
        self.role = "waits"
        #: The preparation that it saw last, and since when. The state in which others do not propose, and since when.
        self._attempt, self._waiting = ("", now), ((), now)
        self._fewer: float | None = None
        self._yields = -math.inf
        #: For whom was left out: until when, and how long the next time.
        self._left_out: dict[Member, tuple[float, float]] = {}

    def adopt(self, entry: Entry) -> bool:
        """Take over an entry that came from another member, or from the store. Return whether it is news."""
        if self.me not in entry.members or (self.entry is not None and entry.number <= self.entry.number):
            return False
        # One that was ready a moment ago, and is no sender, was ready too late to be one.
        ready = self.role == "sends" and self.entry is not None and entry.parent == self.entry.ident
        self.role = "sends" if ready or self.me in entry.senders else "copies"
        self.entry = entry
        return True

    def missed(self) -> None:
        """The store did not answer."""
        self._fewer = None

    def poll(self, now: float, texts: Mapping[str, str], local: Local) -> Plan:
        """Return what to do. ``now``: seconds of this island's clock. ``texts``: the keys and values of the store."""
        plan, picture = Plan(), Picture(texts)
        if picture.birth is None:
            birth = Birth(self._draw(8), int(local.unix))
            plan.writes.append(Write("birth", write(birth), texts.get("birth")))
            return plan
        if self._birth != picture.birth.nonce:
            self._birth, self._quiet = picture.birth.nonce, now + self.times.quiet
            self._seen, self._polled = {}, None
        self._judge(now, picture)
        if not self._hold(now, picture, local, plan):
            return plan
        if local.ready and self.role == "copies":
            self.role = "sends"
        if picture.entry is not None:
            self.adopt(picture.entry)
        if self.entry and (picture.entry is None or picture.entry.number < self.entry.number):
            plan.writes.append(Write("epoch", write(self.entry), texts.get("epoch")))
        self._connect(now, picture, local, plan)
        self._follow(picture, plan)
        beat = self._beat(now, local, plan)
        plan.writes.append(Write(f"beat/{self.slot}", write(beat)))
        if now >= self._quiet and not local.leaves and self.me in picture.beats:
            picture.beats[self.me] = beat
            self._propose(now, picture, local, plan)
        return plan

    def _judge(self, now: float, picture: Picture) -> None:
        """Count silence by polls that follow each other: neither an outage of the store nor this island's own sleep counts."""
        step = now - self._polled if self._polled is not None else 0.0
        if step >= _LATE * self.times.poll:  # beats that are there may be from before it
            step, self._quiet = 0.0, max(self._quiet, now + _LATE * self.times.poll)
        self._polled = now
        there = {slot.me for slot in picture.slots.values()} | picture.beats.keys()
        self._seen = {me: seen for me, seen in self._seen.items() if me in there}
        for me in there:
            count = picture.beats[me].count if me in picture.beats else -1
            seen = self._seen.setdefault(me, _Seen(count))
            if seen.count == count:
                seen.silence += step
            else:
                self._seen[me] = _Seen(count, moved=True)

    def _silent(self, me: Member, picture: Picture, local: Local) -> bool:
        """Return whether its beats stand still, and no live island receives from it."""
        if me in picture.beats and picture.beats[me].role == "leaves":
            return True
        if self._seen[me].silence < self.times.silent:
            return False
        return me not in local.received and not any(
            me in beat.received and other != me and self._seen[other].silence < self.times.silent
            for other, beat in picture.beats.items()
        )

    def _is_late(self, me: Member) -> bool:
        return self._seen[me].silence >= _LATE * self.times.poll

    def _alive(self, me: Member, picture: Picture, local: Local) -> bool:
        """Return whether its beats have moved, or a live island receives from it. It may be neither alive nor silent."""
        seen = self._seen[me]
        return not self._silent(me, picture, local) and (seen.moved or seen.silence >= 2 * self.times.silent)

    def _hold(self, now: float, picture: Picture, local: Local, plan: Plan) -> bool:
        """Return whether this island holds its slot, and may go on; otherwise ``plan`` has what to do for it."""
        holder, text = picture.slots.get(self.slot), picture.texts.get(f"slot/{self.slot}")
        mine = holder is not None and holder.me == self.me
        claim = Write(f"slot/{self.slot}", write(self.own), text)
        self.holds |= mine
        if self.holds and holder is not None and not mine:
            plan.lost = f"--island {self.slot}: a later start at {holder.host} has taken this slot"
            return False
        if self.entry is None and not self._agree(now, picture, local, plan):
            return False
        if self.holds:
            if holder is None:  # a store that has lost it
                plan.writes.append(claim)
            if "flags" not in picture.texts:
                plan.writes.append(Write("flags", self.own.flags, None))
            return True
        gone = holder is not None and holder.me == local.gone
        if gone or holder is None or (self._silent(holder.me, picture, local) and local.answers is False):
            if gone or now >= self._quiet:
                plan.writes.append(claim)
            return False
        if self._alive(holder.me, picture, local) or local.answers:
            plan.refused = f"--island {self.slot}: the island at {holder.host} has this slot, and is alive"
        plan.ask = holder
        return False

    def _agree(self, now: float, picture: Picture, local: Local, plan: Plan) -> bool:
        """Return whether the flags of the run are those of this island. Flags that no live island has are replaced."""
        flags = picture.texts.get("flags")
        if flags == self.own.flags:
            return True
        others = [slot for slot in picture.slots.values() if slot.flags == flags and slot.me != self.me]
        for slot in others:
            if self._alive(slot.me, picture, local):
                plan.refused = f"--island {self.slot}: island {slot_of(slot.me)} at {slot.host} has other flags"
                plan.flags = slot.flags
        if now >= self._quiet and all(self._silent(slot.me, picture, local) for slot in others):
            plan.writes.append(Write("flags", self.own.flags, flags))
        return False

    def _beat(self, now: float, local: Local, plan: Plan) -> Beat:
        self._count += 1
        return Beat(
            me=self.me,
            count=self._count,
            role="leaves" if local.leaves else self.role,
            iteration=local.iteration,
            exchange=local.exchange,
            entry=self._ident,
            seconds=local.seconds,
            received=Slots.of(local.received),
            attempt=plan.attempt,
            ready=Slots.of(set(plan.connect) & set(local.connected)) if plan.attempt == local.attempt else NOBODY,
            yields=int(now < self._yields),
            **local.shown,
        )

    @property
    def _ident(self) -> str:
        return self.entry.ident if self.entry else ""

    def _connect(self, now: float, picture: Picture, local: Local, plan: Plan) -> None:
        prepared = picture.prepared
        if prepared is None or prepared.number <= self._number(picture) or local.leaves:
            return
        if prepared.nonce != self._attempt[0]:
            self._attempt = prepared.nonce, now
        if self.me in prepared.candidates:
            plan.attempt, plan.connect = prepared.nonce, prepared.candidates

    def _follow(self, picture: Picture, plan: Plan) -> None:
        """Note how far the other senders are."""
        others = [beat for me, beat in picture.beats.items() if me != self.me and beat.entry == self._ident]
        if there := [beat for beat in others if beat.role == "sends"]:
            plan.run, plan.seconds = median_low(beat.exchange for beat in there), median(beat.seconds for beat in there)

    def _number(self, picture: Picture) -> int:
        """Return the number of the newest entry; without one, the birth of the store, so that numbers never repeat."""
        known = [entry.number for entry in (picture.entry, self.entry) if entry is not None]
        return max([*known, picture.birth.time if picture.birth else 0])

    def _propose(self, now: float, picture: Picture, local: Local, plan: Plan) -> None:
        """Prepare an entry, or commit it, if it is this island's turn. Islands that have come meanwhile are in the one after it."""
        live = self._live(picture, local)
        if self.me not in live or not self._is_turn(now, picture, live):
            return
        base, last = self.entry, picture.entry
        wanted = tuple(me for me in live if now >= self._left_out.get(me, (0.0, 0.0))[0])
        if messages.stands(wanted, live, base, last):
            self._fewer = None
            return
        number, there = self._number(picture) + 1, picture.prepared
        prepared = there if there is not None and there.number == number else None
        ours = prepared is not None and prepared.by in live and live[prepared.by].entry == self._ident  # this branch's
        own = prepared if ours and self.me in prepared.candidates else None
        left = tuple(me for me in wanted if own is not None and me in own.candidates)
        age, late = now - self._attempt[1], self.times.connect + 2 * self.times.poll
        if own is None or messages.stands(left, live, base, last) or (left != wanted and age >= late):
            if prepared is None or prepared.by == self.me or age >= late:
                new = write(Preparation(number, self.me, self._draw(4), wanted))
                plan.writes.append(Write("prepare", new, picture.texts.get("prepare")))
            return
        ready = {me: live[me].ready for me in left if live[me].attempt == own.nonce and not self._is_late(me)}
        members = messages.connected(left, ready, self._senders(live, base))
        if members != left and age < self.times.connect:
            return
        self._leave_out(now, left, members, picture, plan)
        if self._may_commit(now, members, live, base, last):
            entry = self._entry(own, members, live, base, local)
            plan.writes.append(Write("epoch", write(entry), picture.texts.get("epoch")))

    def _live(self, picture: Picture, local: Local) -> dict[Member, Beat]:
        """Return the possible members of an epoch with this island, by slot. A late one gets the newest entry of its receivers."""
        live = {
            slot.me: picture.beats[slot.me]
            for _, slot in sorted(picture.slots.items())
            if slot.flags == self.own.flags and slot.me in picture.beats and not self._silent(slot.me, picture, local)
        }
        late, newest = [me for me in live if self._is_late(me)], picture.entry.ident if picture.entry else ""
        for me in late:
            if receivers := [other for other, beat in live.items() if other not in late and me in beat.received]:
                entries = [live[other].entry for other in receivers]
                entry = newest if newest in entries else entries[0]
                live[me] = replace(live[me], entry=entry, received=Slots.of(receivers))
        return live

    def _is_turn(self, now: float, picture: Picture, live: Mapping[Member, Beat]) -> bool:
        """Return whether this island proposes: the first sender of the largest branch, or another in its place."""
        branches = messages.branches_of(live)
        if branches:
            best = max(branches, key=lambda ident: messages.weight(branches[ident], live, ident))
            if self._ident != best:
                return False
            turn = sorted(branches[best], key=lambda me: (live[me].role != "sends", slot_of(me)))
        elif len(live) < self._islands and now - self._began < self.times.join:
            return False
        else:
            turn = list(live)
        state = (self._number(picture), *live)
        if self._waiting[0] != state:
            self._waiting = state, now
        return self.me == turn[0] or now - self._waiting[1] > self.times.connect + 4 * self.times.poll

    def _senders(self, live: Mapping[Member, Beat], base: Entry | None) -> list[Member]:
        """Return the live senders of ``base``."""
        if base is None:
            return []
        late = {me for me in base.senders if live.get(me) and live[me].entry == base.parent}  # has not read base yet
        return [me for me, beat in live.items() if beat.role == "sends" and (beat.entry == base.ident or me in late)]

    def _leave_out(self, now: float, wanted: Members, members: Members, picture: Picture, plan: Plan) -> None:
        for me in wanted:
            if me in members or me == self.me:
                self._left_out.pop(me, None)
                continue
            wait = self._left_out.get(me, (0.0, self.times.again))[1]
            self._left_out[me] = now + wait, min(2 * wait, self.times.most_again)
            slot = picture.slots[slot_of(me)]
            plan.lines.append(
                f"island {slot_of(me)} at {slot.host} is left out, and tried again in {wait:.0f} s: not all members have a "
                f"connection with it; open {slot.address} to them, or their ports to it"
            )

    def _may_commit(
        self, now: float, members: Members, live: Mapping[Member, Beat], base: Entry | None, last: Entry | None
    ) -> bool:
        """Return whether ``members`` are enough, and no other branch brings more of them."""
        if base is not None:
            branches = messages.branches_of(live)
            brought = {ident: len(set(branch) & set(members)) for ident, branch in branches.items()}
            best = max(branches, key=lambda ident: (brought[ident], *messages.weight(branches[ident], live, ident)[1:]))
            if best != base.ident:
                self._yields = now + self.times.again
                return False
            if messages.stands(members, live, base, last):
                return False
        former = base or last
        # Of an island that has begun again, the former process has ended.
        there = {slot_of(me) for me in members}
        if former is None or 2 * len(there & {slot_of(me) for me in former.senders}) >= len(former.senders):
            self._fewer = None
            return True
        self._fewer = now if self._fewer is None else self._fewer
        return now - self._fewer >= self.times.alone

    def _entry(
        self, prepared: Preparation, members: Members, live: Mapping[Member, Beat], base: Entry | None, local: Local
    ) -> Entry:
        """Return the entry of ``members``, late enough for all to have read it before its first exchange."""
        senders = [me for me in self._senders(live, base) if me in members]
        if not senders:
            most = max(live[me].iteration for me in members)
            senders = [me for me in members if live[me].iteration == most]
        first = max(live[me].exchange for me in senders)
        if base is not None:
            first += 1 + math.ceil(self.times.read / max(1e-3, min(live[me].seconds for me in senders)))
        iteration = max(live[me].iteration + (first - live[me].exchange) * local.interval for me in senders)
        return Entry(prepared.number, members, tuple(senders), first, iteration, self._ident, prepared.nonce)
