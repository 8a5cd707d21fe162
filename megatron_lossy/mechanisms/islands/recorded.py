"""Runs of islands that came and went by themselves, as their logs of exchanges have them (:mod:`.exchange_log`)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...config import LossyConfig
from ...errors import UsageError, cannot, refuse
from ...flags import as_text, identity
from ...jobs import folder_of
from .exchange_log import MEANS, PIECES, exchanges_file
from .schedule import FLAG

#: Flags that a run in one process may have others of: it has no networks, and saves and looks as it likes.
_MAY_DIFFER = ("--rendezvous", "--island-", "--transport", "--udp-", "--eval-weights", "--save-")


@dataclass
class Crossed:
    """An exchange at one island.

    ``senders``: the islands that it was made among; ``None``: nobody. ``member``: whether the island uses its mean. ``pieces``,
    ``means``: what arrived from each sender, as :func:`.exchange_log.packed`; ``None``: nothing did, or the island died before.
    """

    senders: list[int] | None
    member: bool
    pieces: list[int | str] | None = None
    means: list[int | str] | None = None
    lost: bool = False

    def came(self, what: str, sender: int) -> bool:
        """Whether anything of ``what`` of ``sender`` arrived."""
        rows = self.pieces if what == PIECES else self.means
        return rows is not None and self.senders is not None and rows[self.senders.index(sender)] != 0


@dataclass
class IslandRecord:
    """The record of one island.

    ``exchanges``: by rank and number. ``trains``: ranges of iterations of the run that it made. ``events``: lines of the first rank, with
    the digests of ``weights`` of all ranks.
    """

    ranks: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    exchanges: list[dict[int, Crossed]] = field(default_factory=list)
    trains: list[range] = field(default_factory=list)

    def at(self, iteration: int) -> list[dict[str, Any]]:
        """The events before ``iteration`` of the run, in their order."""
        return [one for one in self.events if one["t"] == iteration]

    def makes(self, iteration: int) -> bool:
        """Whether it makes ``iteration`` of the run."""
        return any(iteration in one for one in self.trains)


class Recorded:
    """The run of all islands in the folder ``path``, the one of its ``--delivery-log``. Raises :class:`UsageError` for a bad one."""

    def __init__(self, path: str, config: LossyConfig) -> None:
        self._path, self._interval = Path(path), config.sync_interval
        self.islands = [self._read(slot, config) for slot in range(config.islands)]
        if not any(one.events for one in self.islands):
            raise refuse(FLAG, path, f"has no {exchanges_file(0)} in {folder_of('', 'island', 0)} or another island")
        self.ranks = max(one.ranks for one in self.islands)
        self._check_ranks(config)
        #: The states that are needed later: island, and iterations of the run before each.
        self.needed = sorted(set(self._needed()))
        for slot, iteration in self.needed:
            self._stay(slot, iteration)
        self._check_arrivals()

    def _wrong(self, path: Path, line: int, why: str) -> UsageError:
        return refuse(FLAG, self._path, f"{path.relative_to(self._path)}, line {line}: {why}")

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self, slot: int, config: LossyConfig) -> IslandRecord:
        record = IslandRecord()
        folder = Path(folder_of(self._path, config.jobs().name, slot))
        if not (folder / exchanges_file(0)).exists():
            return record
        rank = 0
        while rank == 0 or rank < record.ranks:
            path = folder / exchanges_file(rank)
            record.exchanges.append({})
            for line, one in self._lines(path):
                try:
                    if "event" in one:
                        self._event(record, rank, one, config)
                    else:
                        self._exchange(record.exchanges[rank], one)
                        if rank == 0 and one["what"] == "begins" and record.trains:
                            record.trains[-1] = range(record.trains[-1].start, one["t"])
                except (KeyError, TypeError, ValueError, IndexError) as error:
                    if isinstance(error, UsageError):
                        raise
                    raise self._wrong(path, line, f"is no line of an exchange or event ({error!r})") from None
            rank += 1
        return record

    def _lines(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError as error:
            raise cannot(FLAG, path, "read", error) from None
        for number, line in enumerate(lines, start=1):
            try:
                yield number, json.loads(line)
            except ValueError:
                if number < len(lines):  # the last one may be what a death has left of it
                    raise self._wrong(path, number, "is no JSON") from None

    def _event(self, record: IslandRecord, rank: int, one: dict[str, Any], config: LossyConfig) -> None:
        now, event = int(one["t"]), one["event"]
        if event == "enters":
            # What it had made after that was lost with all who had heard of it: the run began again there.
            for number in [r for r in record.exchanges[rank] if (r + 1) * self._interval > now]:
                del record.exchanges[rank][number]
        if rank:
            for each in record.events if "weights" in one else ():
                if (each["t"], each["event"]) == (now, event):
                    each["weights"].append(one["weights"])
            return
        if "weights" in one:
            one["weights"] = [one["weights"]]
        if event == "enters":
            self._check_flags(one, config)
            record.ranks = int(one["ranks"])
            record.events = [each for each in record.events if each["t"] <= now]
            record.trains = [range(each.start, min(each.stop, now)) for each in record.trains if each.start < now]
            record.trains.append(range(now, now))
        elif event == "goes on":
            *before, last = record.trains
            record.trains = [*before, range(last.start, max(int(one["at"]), last.start)), range(now, now)]
        elif event == "leaves":
            record.trains[-1] = range(record.trains[-1].start, now)
        record.events.append(one)

    @staticmethod
    def _exchange(exchanges: dict[int, Crossed], one: Mapping[str, Any]) -> None:
        number, what = int(one["exchange"]), one["what"]
        if one["shard"]:
            raise ValueError(f"shard {one['shard']}: only models with one optimizer can be made again")
        if what == "begins":
            exchanges[number] = Crossed(one["senders"], bool(one["member"]))
        elif what == PIECES:
            exchanges[number].pieces = one["arrived"]
        elif what == MEANS:
            exchanges[number].means = one["arrived"]
        else:
            exchanges[number].lost = True

    def _check_flags(self, one: Mapping[str, Any], config: LossyConfig) -> None:
        here = {"--" + name.replace("_", "-"): as_text(value) for name, value in identity(config).items()}
        for name, value in here.items():
            there = one["flags"].get(name, value)
            if there != value and not name.startswith(_MAY_DIFFER):
                raise refuse(name, value, f"the run in {FLAG} {self._path} had {there}")
        if one["islands"] != config.islands:
            raise refuse("--islands", config.islands, f"the run in {FLAG} {self._path} had {one['islands']}")

    def _check_ranks(self, config: LossyConfig) -> None:
        others = {one.ranks for one in self.islands if one.events} - {self.ranks}
        if others:
            raise refuse(FLAG, self._path, f"islands of {self.ranks} and of {min(others)} ranks")
        if self.ranks > 1 and any(
            one["flags"].get("--transport") == "udp"
            for island in self.islands
            for one in island.events
            if one["event"] == "enters"
        ):
            why = (
                "islands of several ranks over --transport udp lost gradients and parameters, too, which are not in it"
            )
            raise refuse(FLAG, self._path, why)

    # --- what it takes ---------------------------------------------------------------------------------------------

    def _needed(self) -> Iterator[tuple[int, int]]:
        for slot, island in enumerate(self.islands):
            first = True
            for one in island.events:
                if one["event"] == "enters":
                    if not first:
                        yield slot, int(one["at"])
                    elif one["at"]:
                        why = f"island {slot} began with the checkpoint of iteration {one['at']}, of another run"
                        raise refuse(FLAG, self._path, why)
                    first = False
                elif one["event"] == "copied":
                    yield int(one["source"]), int(one["made"])

    def _stay(self, slot: int, iteration: int) -> None:
        """Let the island of ``slot`` train until ``iteration``: it had, although it exchanged nothing more before it died."""
        trains = self.islands[slot].trains
        for number, one in enumerate(trains):
            following = trains[number + 1].start if number + 1 < len(trains) else None
            if one.start <= iteration and (following is None or iteration < following):
                if one.stop < iteration:
                    if iteration - one.stop >= self._interval:
                        break
                    trains[number] = range(one.start, iteration)
                return
        if iteration == 0:
            return
        raise refuse(FLAG, self._path, f"has no island {slot} that had made {iteration} iterations, as others say")

    def _check_arrivals(self) -> None:
        """Raise :class:`UsageError` if something arrived that nobody sent: it would be waited for forever."""
        for slot, island in enumerate(self.islands):
            for rank, exchanges in enumerate(island.exchanges):
                for number, one in exchanges.items():
                    for sender in one.senders or ():
                        for what in (PIECES, MEANS):
                            if one.came(what, sender) and not self._sent(sender, rank, number, what, one.senders or []):
                                why = f"{what} of island {sender} arrived at island {slot} in exchange {number}, and were not sent"
                                raise refuse(FLAG, self._path, why)

    def _sent(self, sender: int, rank: int, number: int, what: str, senders: Sequence[int]) -> bool:
        exchanges = self.islands[sender].exchanges
        one = exchanges[rank].get(number) if rank < len(exchanges) else None
        if one is None or one.senders != senders:
            return False
        return what == PIECES or one.pieces is not None

    def takers(self, rank: int, number: int, sender: int, what: str) -> int:
        """The number of islands at which ``what`` of ``sender`` arrived in an exchange."""
        found = 0
        for island in self.islands:
            one = island.exchanges[rank].get(number) if rank < len(island.exchanges) else None
            found += one is not None and one.senders is not None and sender in one.senders and one.came(what, sender)
        return found
