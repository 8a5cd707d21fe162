"""Epochs of membership: the islands that are there, those of them that send, and the first exchange (docs/islands.md).

Islands need not agree on who is there: a message to or from someone who is not counts as lost. An epoch decides only who
owns which means and for whom to wait. Everything here is a function of its arguments, so that all who get the same
answer compute the same epoch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import refuse
from ...base.files import write_text, writing
from ...run.monitor.observer import Observer
from .membership.messages import Entry, slot_of

#: The name of the file of the log, in the folder of ``--delivery-log``.
EPOCHS = "_epochs.jsonl"
_FLAG = "--delivery-log"
_ID_BYTES = 8


class Incarnation(NamedTuple):
    """One life of an island. ``begun``: differs with every start."""

    begun: int
    drawn: int = 0


class Member(NamedTuple):
    """An island that takes part in exchanges.

    ``role``: "send", so that its weights are in the mean, and it owns a share of the means; or "listen": it only gets means.
    """

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
    def slots(self) -> list[int]:
        """All who get means."""
        return [one.slot for one in self.members]

    @property
    def senders(self) -> list[int]:
        """Those whose weights are averaged. The k-th owns the k-th of as many shares of the exchanged elements."""
        return [one.slot for one in self.members if one.role == "send"]


def epoch_of(entry: Entry) -> Epoch:
    """The epoch of ``entry``."""
    members = [
        Member(slot_of(one), Incarnation(int(one.partition("/")[2], 16)), "send" if one in entry.senders else "listen")
        for one in sorted(entry.members, key=slot_of)
    ]
    return Epoch(tuple(members), entry.first)


def least_lag(lags: Sequence[int]) -> int:
    """The place of the least of ``lags``; of equal ones the first."""
    return min(range(len(lags)), key=lambda place: lags[place])


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
