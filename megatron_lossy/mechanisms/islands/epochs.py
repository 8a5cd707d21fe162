"""Epochs of membership: the islands that are there, those of them that send, and the first exchange (docs/islands.md).

Islands need not agree on who is there: a message to or from someone who is not counts as lost. An epoch decides only who
owns which means and for whom to wait. Everything here is a function of its arguments, so that all who get the same
answer compute the same epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import refuse
from ...base.files import write_text, writing
from ...run.monitor.observer import Observer

#: The name of the file of the log, in the folder of ``--delivery-log``.
EPOCHS = "_epochs.jsonl"
_FLAG = "--delivery-log"
#: A sender's weights are in the mean, and it owns a share of the means. A listener only gets means.
ROLES = ("send", "listen")
_ID_BYTES = 8
#: Seconds beside the time until a death is noticed that all need to get an answer.
ANSWERED = 2.0
#: Seconds from one exchange to the next, at least.
_LEAST = 1e-6
#: Seconds from one exchange to the next, before any island has made two.
UNKNOWN = 1.0


class Incarnation(NamedTuple):
    """One life of an island. ``begun``: rises with every start, for example in ns. ``drawn``: tells equal ones apart."""

    begun: int
    drawn: int = 0


class Member(NamedTuple):
    """An island that takes part in exchanges."""

    slot: int
    incarnation: Incarnation
    role: str


@dataclass(frozen=True)
class Epoch:
    """``members``: rising by slot. ``first``: the exchange from which on they are there."""

    members: tuple[Member, ...]
    first: int

    @cached_property
    def id(self) -> str:
        """16 hexadecimal digits: a digest of the members alone."""
        lines = [f"{slot} {begun} {drawn} {role}\n" for slot, (begun, drawn), role in self.members]
        return blake2b("".join(lines).encode(), digest_size=_ID_BYTES).hexdigest()

    @property
    def key(self) -> tuple[str, int]:
        """The id and the first exchange, which no other epoch has."""
        return self.id, self.first

    @property
    def number(self) -> int:
        """A number of 63 bits that other epochs do not have, also of the same members."""
        return int(blake2b(f"{self.id} {self.first}".encode(), digest_size=_ID_BYTES).hexdigest(), 16) >> 1

    @property
    def slots(self) -> list[int]:
        """All who get means."""
        return [one.slot for one in self.members]

    @property
    def lives(self) -> list[tuple[int, Incarnation]]:
        """Slot and start of all members."""
        return [(one.slot, one.incarnation) for one in self.members]

    @property
    def senders(self) -> list[int]:
        """Those whose weights are averaged. The k-th owns the k-th of as many shares of the exchanged elements."""
        return [one.slot for one in self.members if one.role == "send"]


class Heard(NamedTuple):
    """The news that an island tells of itself.

    ``lag``: see :mod:`.presence`, in iterations. ``digest``: of all that must be equal for weights to be averaged.
    ``step``: its latest exchange; -1 before the first. ``seconds``: from one exchange to the next; ``None``: it has not made two. ``epoch``:
    id and first exchange of the epoch that it knows. ``broken``: it cannot exchange in that one any more. ``waits``: it has not begun.
    """

    member: Member
    lag: int
    digest: str
    step: int
    seconds: float | None
    epoch: tuple[str, int] | None = None
    broken: bool = False
    waits: bool = False


def _precedes(one: Heard, other: Heard) -> bool:
    if one.waits != other.waits:
        return other.waits
    later = one.member.incarnation > other.member.incarnation
    return later != one.waits


def counting(heard: Iterable[Heard], digest: str | None) -> tuple[list[Heard], list[Heard]]:
    """Those of ``heard`` who count, rising by slot, and those who are refused.

    Of two starts of a slot one that runs counts before one that waits, of those that run the later, of those that wait the earlier.
    Refused is who has another digest than ``digest``; without one, than the
    lowest slot.
    """
    latest: dict[int, Heard] = {}
    for one in heard:
        known = latest.get(one.member.slot)
        if known is None or _precedes(one, known):
            latest[one.member.slot] = one
    found = [latest[slot] for slot in sorted(latest)]
    if found and digest is None:
        digest = found[0].digest
    return [one for one in found if one.digest == digest], [one for one in found if one.digest != digest]


def _as(role: str, one: Heard) -> Heard:
    return one._replace(member=one.member._replace(role=role))


def least_lag(lags: Sequence[int]) -> int:
    """The place of the least of ``lags``; of equal ones the first."""
    return min(range(len(lags)), key=lambda place: lags[place])


def next_epoch(
    heard: Sequence[Heard], last: Epoch | None, digest: str | None, timeout: float, keep: int = 0
) -> Epoch | None:
    """The epoch after ``last`` by an answer that all get; ``last`` itself if the members are the same.

    ``timeout``: seconds after which a silent island counts as dead. Exchanges go on while the answer is under way, so
    that the new epoch begins so many later; if all wait for it, it begins at once, and who is more than ``keep`` exchanges behind
    listens. ``digest``: that of ``last``. Who computed another beginning of the same epoch takes the latest that somebody knows.
    If somebody cannot exchange in it any more, it begins anew. If nobody sends, the one with the least lag does. ``None`` if nobody
    counts.
    """
    # Who has not begun has nothing to say in what is running, but where that counts on it.
    expected = set() if last is None else {(one.slot, one.incarnation) for one in last.members}
    there = [one for one in heard if not one.waits]
    if there:
        heard = [one for one in heard if not one.waits or (one.member.slot, one.member.incarnation) in expected]
    count, _ = counting(heard, digest)
    if not count:
        return None
    step, later = max(one.step for one in count), 0
    if not there:
        count = [_as("listen", one)._replace(lag=step - one.step) if step - one.step > keep else one for one in count]
    else:
        seconds = min((one.seconds for one in count if one.seconds is not None), default=UNKNOWN)
        later = math.ceil((timeout + ANSWERED) / max(seconds, _LEAST))
    if all(one.member.role != "send" for one in count):
        sender = count[least_lag([one.lag for one in count])]
        count = [_as("send", one) if one is sender else one for one in count]
    epoch = Epoch(tuple(one.member for one in count), step + 1 + later)
    known = [one.epoch[1] for one in count if one.epoch is not None and one.epoch[0] == epoch.id]
    if last is not None and last.id == epoch.id:
        known.append(last.first)
    if not known:
        return epoch
    latest = max(known)
    if any(one.broken and one.epoch == (epoch.id, latest) for one in count):
        return epoch
    return Epoch(epoch.members, latest)


def line(
    exchange: int, made: int, epoch: Epoch | None, lag: Any, events: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    """Return a line about ``epoch``, or about none, in which ``exchange`` is made after ``made`` iterations of the run.

    ``exchange``: the first of the epoch. ``lag``: of each member. ``events``: of a schedule. ``more``: for example ``returned``, what
    islands did that are there again.
    """
    members = () if epoch is None else epoch.members
    return {
        "exchange": exchange,
        "id": None if epoch is None else epoch.id,
        "t": made,
        "members": [[one.slot, one.incarnation.begun] for one in members],
        "roles": [one.role for one in members],
        "lag": lag,
        "events": events,
        **more,
    }


class EpochLog(Observer):
    """The log of epochs: a line of JSON for each epoch and each event. Readers of Parquet skip names that begin with an underscore.

    ``folder``: of the delivery log. ``keeps``: all lines, if the run goes on from a checkpoint: others have gone on meanwhile.
    """

    def __init__(self, folder: str, keeps: bool = False) -> None:
        self._path, self._keeps = Path(folder, EPOCHS), keeps
        self._ours = False

    def check(self) -> None:
        """Raise :class:`UsageError` if the file is of another run."""
        if not self._ours and self._path.exists():
            raise refuse(_FLAG, self._path.parent, "holds the log of a run; choose another folder")

    def add(self, record: dict[str, Any]) -> None:
        """Write a line. Raises :class:`UsageError` if the file is of another run."""
        self.check()
        self._ours = True
        with writing(_FLAG, self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def restart(self, iteration: int) -> None:
        """Keep the lines before ``iteration``, or all. One that a killed run has left unfinished is the last, and later."""
        self._ours = True
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["t"] >= iteration and not self._keeps:
                    break
            except ValueError:
                break
            kept.append(line)
        write_text(self._path, "".join(kept))
