"""Presence of islands: members, those that stopped, and those that may send (docs/islands.md#islands-that-come-and-go).

Times are iterations of the run, made by any island. The lag of an island is what the run has made since the island last
sent, less its own updates since. An island whose lag is large and mostly idleness has stopped: its weights are old, and
would hold the mean back. It copies an island that is there, or it listens for a while. An island that was only alone,
slow or briefly away keeps everything.

An epoch decides which islands own which means, and which to wait for. Islands need not agree on who is there: a message to or from one that is not
counts as lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import NamedTuple, Protocol

import numpy as np

from ...config import LossyConfig
from .membership.messages import Entry, slot_of

_ID_BYTES = 8
#: Share of the distance of outer weights that is as good as none.
_LEFT = 0.01


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

    ``trains``: makes iterations. ``reached``: by others. ``listens``: until it may send. ``own``: has weights of the
    run. ``life``: counts its starts. ``fresh``: it has not been there since it started. ``sent``: iterations of the run
    when it last sent; ``made``: its own since.
    """

    trains: bool = True
    reached: bool = True
    listens: bool = False
    own: bool = True
    life: int = 0
    fresh: bool = False
    sent: int = 0
    made: int = 0

    def lag(self, now: int) -> int:
        """Return the lag after ``now`` iterations of the run."""
        return now - self.sent - self.made

    def stopped(self, now: int, keep: int) -> bool:
        """Return whether weights are too old to send. ``keep``: the largest lag that is none, in iterations."""
        return self.lag(now) > keep and 2 * self.lag(now) > now - self.sent

    @property
    def member(self) -> bool:
        """Whether it takes part in exchanges."""
        return self.trains and self.reached


class Presence(Protocol):
    """The islands of this process."""

    @property
    def slots(self) -> Sequence[Slot]:
        """All of them."""

    @property
    def members(self) -> Sequence[int]:
        """The numbers of those that take part in exchanges."""


class Standing:
    """The presence of one island of real ranks: whether it sends, and how far behind it is."""

    def __init__(self, config: LossyConfig) -> None:
        self.slot = Slot()
        self.slots, self.members = [self.slot], [0]
        self._overlap, self._outer = config.overlap, config.outer_optimizer if config.has_outer_optimizer else None

    def enter(self, made: int) -> None:
        """Begin after ``made`` iterations. Without any, the weights are the run's only if all islands begin."""
        self.slot.own, self.slot.sent = made > 0, made

    def joins(self, now: int, keep: int) -> bool:
        """Join an epoch of others, which have made ``now`` iterations. Return whether the island begins to listen.

        Weights of an island that has trained most of the time are not old: it keeps them. Outer weights are old after any absence.
        """
        before = self.slot.listens
        self.slot.listens |= self._outer is not None and now > 0
        self.slot.own |= now == 0
        self.slot.listens |= not self.slot.own or self.slot.stopped(now, keep)
        return self.slot.listens and not before

    def copied(self, made: int, now: int, keep: int) -> None:
        """Take the state of a sender as of ``made`` iterations of the run, which has made ``now``."""
        self.slot.own, self.slot.sent, self.slot.made = True, made, 0
        self.slot.listens = self.slot.stopped(now, keep)

    def may_send(self, visits: int) -> bool:
        """Begin an exchange. Return whether the island is about to send again.

        ``visits``: how often means have set each element since it began to listen, at least.
        """
        needed = needed_visits(self._overlap, self.slot.own) if self._outer is None else outer_visits(*self._outer)
        if self.slot.listens and visits >= needed:
            self.slot.listens, self.slot.own = False, True
            return True
        return False

    def sent(self, now: int) -> None:
        """Note that it has sent after ``now`` iterations of the run."""
        self.slot.sent, self.slot.made = now, 0
