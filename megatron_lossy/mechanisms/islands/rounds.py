"""Exchanges between islands in their order: begun, under way, used (*AsyncMesh*, Algorithm 1 and section 3.1).

After each iteration, also one that the optimizer skipped, an exchange that is due begins with the current weights. Then
the exchanges that began ``--sync-delay`` iterations ago are used, oldest first. The delay is exact, so that a run can
be repeated; a late island is waited for.

Below is the presence of islands: members, those that stopped, and those that may send (docs/islands.md#islands-that-come-and-go). Times
are iterations of the run, made by any island. The lag of an island is what the run has made since the island last sent, less its own
updates since. An island whose lag is large and mostly idleness has stopped: its weights are old, and would hold the mean back. It copies
an island that is there, or it listens for a while. An island that was only alone, slow or briefly away keeps everything.

An epoch decides which islands own which means, and which to wait for. Islands need not agree on who is there: a message to or from one
that is not counts as lost.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NamedTuple

import numpy as np
import torch

from ...config import LossyConfig
from .mean import Mean
from .membership.messages import Entry, slot_of
from .rules import Result, make_rule
from .vector import Places, Subset, Vector, read_at, write_at

#: Visits of a rank without elements, or of an island that does not listen.
MANY = 2**31
_ID_BYTES = 8
#: Share of the distance of outer weights that is as good as none.
_LEFT = 0.01


@dataclass
class Flight:
    """An exchange under way. ``step``: the iteration before it. ``snapshot``: of the rule. ``pending``: waits for the mean."""

    number: int
    step: int
    places: Places | None
    sent: torch.Tensor
    snapshot: Sequence[torch.Tensor] | None
    pending: Any


class Rounds:
    """The exchanges of one vector, or shard of it, of the islands of this process: ``vectors``, one for each island.

    ``subset``: chooses the elements of each exchange. ``crossing``: :class:`.InMemory` or :class:`.RankExchanges`. ``steps``: length of the run, if known. ``device``: that
    of the weights. ``used``: called when a mean is used, with the seconds of waiting for it, the values that had been sent
    float32[islands, k], and the mean.
    """

    def __init__(
        self,
        config: LossyConfig,
        subset: Subset,
        vectors: Sequence[Vector],
        crossing: Any,
        steps: int | None,
        device: torch.device,
        used: Callable[[float, torch.Tensor, Mean], None] | None = None,
    ) -> None:
        self.subset, self.vectors, self.crossing = subset, vectors, crossing
        with torch.no_grad():
            self.rule = make_rule(config, [vector.read(None) for vector in vectors], steps)
        self.flights: list[Flight] = []
        self._interval, self._delay = config.sync_interval, config.sync_delay
        self._device, self._used = device, used

    @torch.no_grad()
    def after_iteration(self, step: int) -> int | None:
        """Begin and use the exchanges due after iteration ``step``. Return the elements of the one that begins, if one does."""
        number, left = divmod(step + 1, self._interval)
        if left and (step + 1 - self._delay) % self._interval:
            return None
        for vector in self.vectors:
            vector.gather_weights()
        begun = None if left else self._begin(number - 1, step)
        due = [flight for flight in self.flights if flight.step + self._delay == step]
        self.flights = [flight for flight in self.flights if flight.step + self._delay > step]
        for flight in due:
            began = time.perf_counter()
            mean = flight.pending.wait()
            if self._used is not None:
                self._used(time.perf_counter() - began, flight.sent, mean)
            self._use(flight, mean, step)
        if begun is not None and not due and self.rule.always:
            nothing = Mean(torch.zeros_like(begun.sent[0]), torch.zeros_like(begun.sent, dtype=torch.bool))
            self._use(begun, nothing, step)
        for vector in self.vectors:
            vector.scatter_weights()
        return None if begun is None else begun.sent.shape[1]

    def _begin(self, number: int, step: int) -> Flight | None:
        places = self.subset.places(number, self._device)
        now = [vector.read(places) for vector in self.vectors]
        sent = self.rule.payload(torch.stack(now) if len(now) > 1 else now[0][None], places, number)
        if not sent.shape[1]:  # a drawn subset may be empty
            return None
        snapshot = self.rule.snapshot(places)
        # The values become what is rounded of them: the rest is progress that an island keeps until it is large enough to cross.
        pending = self.crossing.begin(step, sent, places)
        flight = Flight(number, step, places, sent, snapshot, pending)
        self.flights.append(flight)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int) -> None:
        places = flight.places
        for island in self._takers(flight):
            vector = self.vectors[island]
            arrived = None if mean.arrived is None else mean.arrived[island]
            snapshot = None if flight.snapshot is None else flight.snapshot[island]
            result = Result(flight.sent[island], mean.values, arrived, places, snapshot, step, flight.number)
            vector.write(places, self.rule.apply(island, vector.read(places), result))

    def _takers(self, flight: Flight) -> Sequence[int]:
        """Return the islands of this process that use the mean of ``flight``."""
        return range(len(flight.sent))

    def state_dict(self) -> dict[str, Any]:
        """Return the exchanges under way, which are waited for, the state of the rule, and what owners keep of rounded means."""
        flights = []
        for flight in self.flights:
            mean = flight.pending.wait()
            flights.append((flight.number, flight.step, flight.sent, flight.snapshot, *mean))
        state = {"flights": flights, "rule": self.rule.state_dict()}
        rest = self.crossing.rest
        return state if rest is None else state | {"rest": rest.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore :meth:`state_dict`."""
        self.flights = [
            Flight(number, step, self.subset.places(number, self._device), sent, snapshot, Mean(*mean))
            for number, step, sent, snapshot, *mean in state["flights"]
        ]
        self.rule.load_state_dict(state["rule"])
        if self.crossing.rest is not None:
            self.crossing.rest.load_state_dict(state["rest"])


class MemberRounds(Rounds):
    """``presence``: of the islands of this process, with its ``slots`` and ``members``. Other arguments: those of :class:`Rounds`."""

    def __init__(self, *arguments: Any, presence: Any) -> None:
        super().__init__(*arguments)
        self._presence = presence
        #: The islands that took part in each exchange under way, by the iteration before it.
        self._took_part: dict[int, list[int]] = {}
        #: int16[islands, size]: how often a mean has set each element of a listener since it began to listen.
        self._set = torch.zeros(len(presence.slots), self.subset.size, dtype=torch.int16, device=self._device)

    def visits(self, island: int) -> int:
        """Return the least number of times that an element of a listener was set."""
        return int(self._set[island].min()) if self.subset.size else MANY

    def restart(self, island: int) -> None:
        """Let ``island`` begin again, without the exchanges under way."""
        for members in self._took_part.values():
            if island in members:
                members.remove(island)
        self._set[island] = 0
        self.rule.restart(island)
        self.crossing.forget(island)

    def give_up(self) -> None:
        """Wait for none of the exchanges under way."""
        self.flights = []
        self._took_part.clear()

    def _begin(self, number: int, step: int) -> Flight | None:
        flight = super()._begin(number, step)
        if flight is not None:
            self._took_part[step] = list(self._presence.members)
        return flight

    def _use(self, flight: Flight, mean: Mean, step: int) -> None:
        super()._use(flight, mean, step)
        for island in self._takers(flight):
            if self._presence.slots[island].listens:
                self._count(island, flight, mean)
        del self._took_part[flight.step]

    def _takers(self, flight: Flight) -> Sequence[int]:
        there = self._presence.members
        return [island for island in self._took_part[flight.step] if island in there]

    def _count(self, island: int, flight: Flight, mean: Mean) -> None:
        """Note that a mean has set elements of ``island``."""
        row, places = self._set[island], flight.places
        before = read_at(row, places)
        came = torch.ones_like(flight.sent[island], dtype=torch.bool) if mean.arrived is None else mean.arrived[island]
        write_at(row, places, before + self.rule.set_by(flight.number, came, len(before)).to(torch.int16))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "took part": self._took_part, "set": self._set}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._took_part = {step: list(members) for step, members in state["took part"].items()}
        self._set.copy_(state["set"])


# --- presence --------------------------------------------------------------------------------------------------------


class Member(NamedTuple):
    """An island that takes part in exchanges.

    ``life``: a number that differs with every start. ``role``: "send", so that its weights are in the mean, and it owns a share of the means; or "listen": it only gets means.
    """

    slot: int
    life: int
    role: str


@dataclass(frozen=True)
class Epoch:
    """``members``: rising by slot. ``first``: the exchange from which on they are there."""

    members: tuple[Member, ...]
    first: int

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits: a digest of the members alone."""
        lines = [f"{slot} {life} 0 {role}\n" for slot, life, role in self.members]
        return blake2b("".join(lines).encode(), digest_size=_ID_BYTES).hexdigest()

    @property
    def key(self) -> tuple[str, int]:
        """The id and the first exchange, which no other epoch has."""
        return self.id, self.first

    @property
    def slots(self) -> list[int]:
        """All islands that get means."""
        return [member.slot for member in self.members]

    @property
    def senders(self) -> list[int]:
        """Those whose weights are averaged. The k-th owns the k-th of as many shares of the exchanged elements."""
        return [member.slot for member in self.members if member.role == "send"]


def epoch_of(entry: Entry) -> Epoch:
    """Return the epoch of ``entry``."""
    members = [
        Member(slot_of(member), int(member.partition("/")[2], 16), "send" if member in entry.senders else "listen")
        for member in sorted(entry.members, key=slot_of)
    ]
    return Epoch(tuple(members), entry.first)


def needed_visits(overlap: int, own: bool) -> int:
    """Return the number of times that means must have set each element of a listener before it may send.

    ``overlap``: later exchanges of an element under way when one comes back. ``own``: whether it began with weights of
    the run. A cycle of means is the model; an island that began with others corrects the elements that were set first once more.
    """
    return 3 * (overlap + 1) if overlap else 1 if own else 2


def outer_visits(lr: float, momentum: float) -> float:
    """Return the number of outer steps after which 1 % of the distance of outer weights from those of the senders is left.

    A mean that does not depend on them takes the distances (v, b) to (v - ``lr`` (v + ``momentum`` b'), b'), with
    b' = ``momentum`` b + v.
    """
    step = [[1 - lr * (1 + momentum), -lr * momentum**2], [1.0, momentum]]
    left = float(abs(np.linalg.eigvals(step)).max())
    return math.log(_LEFT) / math.log(left) if _LEFT < left < 1 else 1.0 if left < 1 else math.inf


@dataclass
class Slot:
    """The island of a slot.

    ``listens``: until it may send. ``own``: has weights of the run. ``sent``: iterations of the run when it last sent; ``made``: its own
    since.
    """

    listens: bool = False
    own: bool = True
    sent: int = 0
    made: int = 0

    def lag(self, now: int) -> int:
        """Return the lag after ``now`` iterations of the run."""
        return now - self.sent - self.made

    def stopped(self, now: int, keep: int) -> bool:
        """Return whether weights are too old to send. ``keep``: the largest lag that is none, in iterations."""
        return self.lag(now) > keep and 2 * self.lag(now) > now - self.sent


class Standing:
    """The presence of one island of real ranks: whether it sends, and how far behind it is."""

    def __init__(self, config: LossyConfig) -> None:
        self.slot = Slot()
        self.slots, self.members = [self.slot], [0]
        self._overlap, self._copies = config.overlap, config.has_outer_optimizer
        self._visits = 1.0 if config.refreshes else outer_visits(*config.outer_optimizer)

    def enter(self, made: int) -> None:
        """Begin after ``made`` iterations. Without any, the weights are the run's only if all islands begin."""
        self.slot.own, self.slot.sent = made > 0, made

    def joins(self, now: int, keep: int) -> bool:
        """Join an epoch of others, which have made ``now`` iterations. Return whether the island begins to listen.

        Weights of an island that has trained most of the time are not old: it keeps them. Outer weights are old after any absence.
        """
        before = self.slot.listens
        self.slot.listens |= self._copies and now > 0
        self.slot.own |= now == 0
        self.slot.listens |= not self.slot.own or self.slot.stopped(now, keep)
        return self.slot.listens and not before

    def copied(self, made: int, now: int, keep: int) -> None:
        """Take the state of a sender as of ``made`` iterations of the run, which has made ``now``."""
        self.slot.own, self.slot.sent, self.slot.made = True, made, 0
        self.slot.listens = self.slot.stopped(now, keep)

    def may_send(self, visits: int) -> bool:
        """Begin an exchange. Return whether the island sends again, since means have set each element ``visits`` times."""
        needed = self._visits if self._copies else needed_visits(self._overlap, self.slot.own)
        if self.slot.listens and visits >= needed:
            self.slot.listens, self.slot.own = False, True
            return True
        return False

    def sent(self, now: int) -> None:
        """Note that it has sent after ``now`` iterations of the run."""
        self.slot.sent, self.slot.made = now, 0
