"""Islands, links and a store in trouble at random, in virtual time: the code of the protocol, and what must hold of it."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import replace

from megatron_lossy.mechanisms.islands.membership.messages import Entry, Slot, read, slot_of
from megatron_lossy.mechanisms.islands.membership.protocol import ANY, Island, Local, Times
from megatron_lossy.mechanisms.islands.membership.store import Unreachable

TIMES = Times(join=15.0)
STEP = 0.25
#: Events, and their probabilities in a step of time.
CHANCES = {
    "unlink": 0.0012,
    "one way": 0.0006,
    "freeze": 0.0012,
    "kill": 0.001,
    "outage": 0.0006,
    "cut": 0.001,
    "start": 0.0015,
}
#: The Unix second at which the simulation begins.
UNIX = 1_700_000_000


class Memory:
    """A store in memory. ``lose()``: whether the answer to a write is lost. ``away``: nobody reaches it."""

    def __init__(self, lose=lambda: False):
        self.values, self.lose, self.away = {}, lose, False

    def get(self, key):
        self._reach()
        return self.values.get(key)

    def list(self, prefix):
        self._reach()
        return {key: value for key, value in self.values.items() if key.startswith(prefix)}

    def put(self, key, value):
        self._reach()
        self.values[key] = value

    def put_if(self, key, old, new):
        self._reach()
        if self.values.get(key) != old:
            return False
        self.values[key] = new
        if self.lose():
            raise Unreachable("the answer is lost")
        return True

    def _reach(self):
        if self.away:
            raise Unreachable("away")


class Process:
    """One start of an island. ``made``: exchanges, one a second once it is in the run."""

    def __init__(self, world, slot, flags="f"):
        self.world, self.slot = world, slot
        self.me = f"{slot}/{world.random.getrandbits(32):08x}"
        self.rate, self.offset = world.random.uniform(0.99, 1.01), world.random.uniform(0, 1e6)
        self.phase = world.random.randrange(4)
        self.island = Island(
            Slot(self.me, f"host{slot}", self.me, flags), world.size, world.times, self.clock(), world.draw
        )
        self.made, self.received, self.held, self.copied = 0.0, {}, [], None
        self.alive, self.frozen_until, self.cut_until, self.reached = True, 0.0, 0.0, world.now
        self.ask = self.ended = None
        self.connect, self.attempt, self.lines, self.skipped = (), "", [], 0

    def clock(self):
        return self.offset + self.rate * self.world.now

    def runs(self):
        return self.alive and self.frozen_until <= self.world.now

    def entry(self):
        """The one that it exchanges under."""
        return next((one for one in reversed(self.held) if one.first <= self.made), None)

    def trains_with_others(self):
        received = [self.world.by_name(me) for me, at in self.received.items() if self.world.now - at < TIMES.silent]
        return any(one and one.held and one.held[-1] == self.held[-1] for one in received)  # are there, in this epoch

    def sends(self):
        """Return whether its weights are the run's."""
        return self.island.role == "sends" or (self.copied is not None and self.world.now - self.copied > 5)

    def adopt(self, entry):
        self.note(self.island.adopt(entry))

    def note(self, news=True):
        """Take over the entry of the island, if it is new."""
        entry = self.island.entry
        if not news or entry is None or (self.held and self.held[-1].ident == entry.ident):
            return
        if self.island.role == "copies":
            if self.me in self.world.outnumber.get(entry.ident, ()):
                self.world.note("one that trains with others follows one that is alone", f"{self.me} {entry}")
            self.made, self.copied = float(entry.first), self.world.now
        elif entry.first > self.made + 10:  # it has slept, and keeps its weights
            self.made = float(entry.first)
        self.held.append(entry)

    def poll(self):
        world = self.world
        connected = [me for me in self.connect if me != self.me and world.linked(self.me, me)]
        for me in connected:
            world.met[frozenset((self.me, me))] = world.now
        answers = None if self.ask is None else world.answers(self.ask.me)
        local = Local(
            unix=UNIX + world.now,
            iteration=int(self.made),
            exchange=int(self.made),
            ready=self.sends(),
            received=[me for me, at in self.received.items() if world.now - at < TIMES.silent],
            attempt=self.attempt,
            connected=connected,
            answers=answers,
            gone=self.ask.me if self.ask and self.slot in world.same and not world.by_name(self.ask.me) else "",
        )
        world.store.away = world.away or self.cut_until > world.now
        try:
            texts = world.store.list("")
            self.reached = world.now
            plan = self.island.poll(self.clock(), texts, local)
            self.note()
            self.connect, self.ask, self.ended = plan.connect, plan.ask, plan.refused or plan.lost
            self.attempt = plan.attempt
            self.lines += plan.lines
            if plan.lost:
                world.counts["lost its slot"] += 1
            for write in plan.writes:
                if write.old is ANY:
                    world.store.put(write.key, write.new)
                    continue
                try:
                    written = world.store.put_if(write.key, write.old, write.new)
                except Unreachable:
                    world.written(self, write)
                    raise
                if written:
                    world.written(self, write)
        except Unreachable:
            self.island.missed()


class World:
    """``size`` slots. ``trouble``: something happens at times. ``without``: what is left out, to see that it is missed."""

    def __init__(self, seed, size=5, trouble=True, without=""):
        self.random, self.size, self.trouble, self.without = random.Random(seed), size, trouble, without
        self.times = replace(TIMES, quiet=0.0) if without == "the quiet of a new store" else TIMES
        self.now, self.away, self.away_until, self.wipe = 0.0, False, 0.0, False
        self.store = Memory(lambda: self.random.random() < 0.02)
        # Until when nothing crosses between two slots, or to the first from the second.
        self.down, self.one_way = {}, {}
        self.met, self.back = {}, {}
        self.broken, self.counts, self.entries, self.outnumber = [], Counter(), {}, {}
        self.same = range(0, size, 2)  # slots that come back on the same machine
        self.processes = [Process(self, slot) for slot in range(size)]
        self.others = []  # starts for slots that are taken, or with other flags

    def draw(self, size):
        return self.random.randbytes(size).hex()

    def note(self, rule, what):
        self.broken.append(f"{self.now:.2f} s: {rule}: {what}")

    def linked(self, one, other):
        """Return whether two processes can connect."""
        found, slots = (self.by_name(one), self.by_name(other)), (slot_of(one), slot_of(other))
        return all(process and process.runs() for process in found) and self.gets(*slots) and self.gets(*slots[::-1])

    def gets(self, one, other):
        """Return whether slot ``one`` gets what ``other`` sends."""
        return max(self.down.get(frozenset((one, other)), 0.0), self.one_way.get((one, other), 0.0)) <= self.now

    def by_name(self, me):
        return next((one for one in (*self.processes, *self.others) if one.me == me and one.alive), None)

    def holder(self, slot):
        """Return who holds ``slot`` in the store."""
        found = read(Slot, self.store.values.get(f"slot/{slot}"))
        return found and found.me

    def answers(self, me):
        found = self.by_name(me)
        return found is not None and found.runs() and self.without != "the question to a holder"

    def written(self, process, write):
        if write.key == f"slot/{process.slot}" and write.old:
            old = read(Slot, write.old)
            holder = old and self.by_name(old.me)
            well = holder and (holder.trains_with_others() or self.now - holder.reached < TIMES.silent / 2)
            if well and holder is not process and holder.runs():
                self.note("a start ends a healthy island", f"{process.me} takes the slot of {old.me}")
        if write.key == "epoch":
            self.committed(process, read(Entry, write.new))

    def committed(self, process, entry):
        known = self.entries.get(entry.number)
        if known is not None:  # one that has it writes it into a store that has lost it
            if known.ident != entry.ident:
                self.note("a number is written twice", f"{entry} and {known}")
            return
        self.entries[entry.number] = entry
        senders = [self.by_name(me) for me in entry.senders]
        if not any(one and one.trains_with_others() for one in senders):  # those that train with others must not follow
            everybody = (*self.processes, *self.others)
            self.outnumber[entry.ident] = {one.me for one in everybody if one.sends() and one.trains_with_others()}
        self.counts["entries"] += 1
        for pair in itertools.combinations(entry.members, 2):
            if self.now - self.met.get(frozenset(pair), -1e9) > 2 * TIMES.connect:
                self.note("an epoch with an unconnected pair", f"{pair} of {entry}")
        found = {me: self.by_name(me) for me in entry.members}
        flags = {one.island.own.flags for one in found.values() if one}
        if len(flags) > 1:
            self.note("other flags in one epoch", f"{entry}")
        for me in entry.senders:
            one = found[me]
            if one and entry.parent and one.runs() and self.now - one.reached < 3 and one.made > entry.first:
                self.note("an epoch begins before it can be read", f"{me} is at {one.made}, {entry}")
        there = [one for one in found.values() if one and one.runs() and self.now - one.reached < 3]
        others = Counter(
            one.held[-1].ident
            for one in there
            if one.me not in entry.senders and one.sends() and one.trains_with_others()
            if one.held[-1].ident != entry.parent  # those of its own branch became ready a moment ago, and send on
        )
        if others and max(others.values()) > len(entry.senders):
            self.note("a smaller branch becomes the run", f"{others} and {entry}")

    def disturb(self):
        """Something that happens once in a few minutes."""
        for kind, chance in CHANCES.items():
            if self.random.random() < chance:
                one, other = self.random.sample(range(self.size), 2)
                self.happen(kind, one, other, self.random.random())

    def happen(self, kind, one, other, extent):
        """``one`` and ``other``: slots. ``extent``: 0 to 1, how long it lasts, or how bad it is."""
        now, process = self.now, self.processes[one]
        if kind == "unlink":
            self.down[frozenset((one, other))] = now + 10 + 290 * extent
        elif kind == "one way":
            self.one_way[one, other] = now + 10 + 290 * extent
        elif kind == "freeze":
            process.frozen_until = now + 5 + 85 * extent
        elif kind == "kill":
            self.kill(process)
        elif kind == "outage" and not self.away:
            self.away, self.away_until, self.wipe = True, now + 120, extent < 0.3
        elif kind == "cut":
            for slot in range(one, one + 1 + int(extent * (self.size - 1))):
                self.processes[slot % self.size].cut_until = now + 20 + 130 * extent
        elif kind == "start" and not self.others:
            self.start(one, "f" if extent < 0.5 else "other")

    def start(self, slot, flags="f"):
        """Start another island in ``slot``, which tries for a minute. Return it."""
        other = Process(self, slot, flags)
        other.until = self.now + 60
        self.others.append(other)
        return other

    def kill(self, process):
        if process.alive:
            process.alive = False
            self.back[process.slot] = self.now + self.random.uniform(5, 30)

    def run(self, seconds):
        """Go on for ``seconds``."""
        end = self.now + seconds
        while self.now < end:
            self.now += STEP
            if self.trouble:
                self.disturb()
            if self.away and self.now >= self.away_until:
                self.away = False
                if self.wipe:
                    self.store.values = {}
            self.step()

    def step(self):
        tick = round(self.now / STEP)
        for slot, process in enumerate(self.processes):
            if not process.alive and self.back[slot] <= self.now:
                process = self.processes[slot] = Process(self, slot)
            if process.runs():
                process.made += STEP if process.held else 0.0
                if (tick + process.phase) % 4 == 0:
                    process.poll()
                if process.ended:
                    self.kill(process)
        for other in list(self.others):
            if (tick + other.phase) % 4 == 0 and other.runs():
                other.poll()
            if other.ended or self.now > other.until:
                other.alive = False
                self.others.remove(other)
            elif other.island.holds and self.holder(other.slot) == other.me:  # it is the island of this slot now
                old, self.processes[other.slot] = self.processes[other.slot], other
                self.others.remove(other)
                if old.alive:  # frozen, or cut off, until it finds that
                    old.until = self.now + 1e9
                    self.others.append(old)
                if other.island.own.flags != "f":
                    self.kill(other)
        self.exchange()

    def exchange(self):
        everybody = [one for one in (*self.processes, *self.others) if one.runs()]
        for one, other in itertools.permutations(everybody, 2):
            if not self.gets(one.slot, other.slot) or not (one.held and other.held):
                continue
            here, there = one.entry(), other.entry()
            if here and there and here.ident == there.ident and {one.me, other.me} <= set(here.members):
                one.received[other.me] = self.now
                self.counts["met"] += 1
            theirs = other.held[-1]
            if theirs.number > one.held[-1].number:  # entries travel with frames
                one.adopt(theirs)

    def check_one_epoch(self):
        """That all are in one epoch, once nothing has happened for long."""
        held = {one.me: one.held[-1].ident if one.held else None for one in self.processes if one.alive}
        last = self.processes[0].held[-1] if self.processes[0].held else None
        if len(set(held.values())) != 1 or last is None or set(last.members) != set(held):
            self.note("not one epoch of all after calm", f"{held} {last}")
        elif set(last.senders) != set(last.members):
            self.note("not all send after calm", f"{last}")
