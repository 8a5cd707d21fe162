"""Runs of islands that came and went by themselves, as their logs of exchanges have them (:mod:`.exchange_log`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...base.errors import UsageError, cannot, refuse
from ...base.flags import as_text, identity, texts_by_flag
from ...base.jobs import folder_of
from ...config import LossyConfig
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
        return (
            rows is not None
            and self.senders is not None
            and sender in self.senders
            and rows[self.senders.index(sender)] != 0
        )


@dataclass
class Life:
    """One life of an island. ``events``: lines of its first rank, with the digests of ``weights`` by rank.

    ``trains``: ranges of iterations of the run that it made. ``exchanges``: by rank and number. ``cut_at``: the iteration from which on it
    was in vain, as the run began again there.
    """

    events: list[dict[str, Any]]
    trains: list[range]
    exchanges: list[dict[int, Crossed]] = field(default_factory=list)
    cut_at: int | None = None

    def reach(self, iteration: int) -> None:
        """It has made the iterations of the run before ``iteration``, of those since it last went on."""
        place = max((number for number, one in enumerate(self.trains) if one.start < iteration), default=0)
        one = self.trains[place]
        self.trains[place] = range(one.start, max(one.stop, iteration))

    def cut(self, iteration: int, interval: int) -> None:
        """Forget what it did after ``iteration`` of the run."""
        self.cut_at = iteration
        self.events = [one for one in self.events if one["t"] <= iteration]
        self.trains = [range(one.start, min(one.stop, iteration)) for one in self.trains if one.start <= iteration]
        for exchanges in self.exchanges:
            for number in [one for one in exchanges if (one + 1) * interval > iteration]:
                del exchanges[number]


class _Found(NamedTuple):
    """Events and lives of an island by iteration, and exchanges by rank and number, of all lives."""

    events: dict[int, list[dict[str, Any]]]
    lives: dict[int, Life]
    exchanges: dict[int, dict[int, Crossed]]


@dataclass
class IslandRecord:
    """The record of one island of ``ranks``. ``lives``: by their starts."""

    ranks: int = 0
    lives: dict[int, Life] = field(default_factory=dict)
    _found: _Found | None = None

    @property
    def _all(self) -> _Found:
        if self._found is None:
            self._found = _Found({}, {}, {})
            for life in self.lives.values():
                for one in life.events:
                    self._found.events.setdefault(one["t"], []).append(one)
                self._found.lives.update((iteration, life) for made in life.trains for iteration in made)
                for rank, exchanges in enumerate(life.exchanges):
                    self._found.exchanges.setdefault(rank, {}).update(exchanges)
        return self._found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of all lives, in their order."""
        return [one for life in self.lives.values() for one in life.events]

    def at(self, iteration: int) -> list[dict[str, Any]]:
        """The events before ``iteration`` of the run."""
        return self._all.events.get(iteration, [])

    def life(self, iteration: int) -> Life | None:
        """The one that makes ``iteration`` of the run, if one does."""
        return self._all.lives.get(iteration)

    def exchange(self, rank: int, number: int) -> Crossed | None:
        """The exchange of that number at a rank."""
        return self._all.exchanges.get(rank, {}).get(number)

    def changed(self) -> None:
        """One of its lives has."""
        self._found = None


class Recorded:
    """The run of all islands in the folder ``path``, the one of its ``--delivery-log``. Raises :class:`UsageError` for a bad one."""

    def __init__(self, path: str, config: LossyConfig) -> None:
        self._path, self._interval = Path(path), config.sync_interval
        self._folders = [Path(folder_of(path, config.jobs().name, slot)) for slot in range(config.islands)]
        self.islands = [self._read(folder, config) for folder in self._folders]
        if not any(one.lives for one in self.islands):
            raise refuse(
                FLAG,
                path,
                f"is no log of a run: has no {exchanges_file(0)} in {self._folders[0].name} or another island",
            )
        self.ranks = max(one.ranks for one in self.islands)
        self._check_ranks()
        self._check_arrivals()
        #: The last iteration of the run at which a state is needed, by island and the iteration of the state.
        self.needed: dict[tuple[int, int], int] = {}
        for slot, made, at in self._needs():
            self._stay(slot, made)
            self.needed[slot, made] = max(at, self.needed.get((slot, made), 0))

    @property
    def end(self) -> int:
        """The iterations of the run."""
        return max(made.stop for one in self.islands for life in one.lives.values() for made in life.trains)

    def _wrong(self, why: str) -> UsageError:
        return refuse(FLAG, self._path, why)

    # --- reading ---------------------------------------------------------------------------------------------------

    def _read(self, folder: Path, config: LossyConfig) -> IslandRecord:
        record = IslandRecord()
        rank = 0
        while (folder / exchanges_file(0)).exists() and (rank == 0 or rank < record.ranks):
            path, begun = folder / exchanges_file(rank), None
            for number, one in self._lines(path):
                try:
                    if one.get("event") == "enters":
                        begun = int(one["begun"])
                    if begun is None:
                        raise ValueError("its island has not entered")
                    if "event" in one:
                        self._event(record, rank, begun, one, config)
                    elif begun in record.lives:
                        self._exchange(record.lives[begun], rank, one)
                except UsageError:
                    raise
                except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                    where = path.relative_to(self._path)
                    why = f"{where}, line {number}: is no line of an exchange or event ({error})"
                    raise self._wrong(why) from None
            rank += 1
        for _, later in list(record.lives.items())[1:]:
            # What an earlier life had made after that was lost with all who had heard of it: the run began again there.
            for before in record.lives.values():
                if before is later:
                    break
                if any(made.stop > later.events[0]["t"] for made in before.trains):
                    before.cut(later.events[0]["t"], self._interval)
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
                    where = path.relative_to(self._path)
                    raise self._wrong(f"{where}, line {number}: is no JSON") from None

    def _event(self, record: IslandRecord, rank: int, begun: int, one: dict[str, Any], config: LossyConfig) -> None:
        now, event = int(one["t"]), one["event"]
        if rank:
            same = [each for each in record.lives[begun].events if (each["t"], each["event"]) == (now, event)]
            if "weights" in one and same:
                same[-1]["weights"][rank] = one["weights"]
            return
        if "weights" in one:
            one["weights"] = {0: one["weights"]}
        if event == "enters":
            self._check_flags(one, config)
            record.ranks = int(one["ranks"])
            record.lives[begun] = Life([one], [range(now, now)], [{} for _ in range(record.ranks)])
            return
        life = record.lives[begun]
        if event == "goes on":
            life.reach(int(one["at"]))
            life.trains.append(range(now, now))
        elif now > life.trains[-1].start:
            life.reach(now)
        life.events.append(one)

    @staticmethod
    def _exchange(life: Life, rank: int, one: Mapping[str, Any]) -> None:
        number, what, exchanges = int(one["exchange"]), one["what"], life.exchanges[rank]
        if one["shard"]:
            raise ValueError(f"shard {one['shard']}: only models with one optimizer can be made again")
        if what == "begins":
            exchanges[number] = Crossed(one["senders"], bool(one["member"]))
            life.reach(int(one["t"]))  # also if another rank had not come so far when all died
        elif what == PIECES:
            exchanges[number].pieces = one["arrived"]
        elif what == MEANS:
            exchanges[number].means = one["arrived"]
        else:
            exchanges[number].lost = True

    # --- checks ----------------------------------------------------------------------------------------------------

    def _check_flags(self, one: Mapping[str, Any], config: LossyConfig) -> None:
        for name, value in texts_by_flag(config, identity(config)).items():
            self.check_flag(one["flags"], name, value)
        for name in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            if one["flags"].get(name, "1") != "1":
                why = f"had {name} {one['flags'][name]}; only data-parallel ranks can be made again"
                raise self._wrong(why)

    def check_flag(self, flags: Mapping[str, str], name: str, here: str) -> None:
        """Raise :class:`UsageError` if ``flags``, of the recorded run, have another value of one that matters."""
        if flags.get(name, here) != here and not name.startswith(_MAY_DIFFER):
            raise refuse(name, here, f"the run in {FLAG} {self._path} had {flags[name]}")

    def check_trainer(self, **here: Any) -> None:
        """The same for flags of the trainer, by their names in Python."""
        for island in self.islands:
            for one in island.events:
                for name, value in here.items() if one["event"] == "enters" else ():
                    self.check_flag(one["flags"], "--" + name.replace("_", "-"), as_text(value))

    def _check_ranks(self) -> None:
        others = {one.ranks for one in self.islands if one.lives} - {self.ranks}
        if others:
            raise self._wrong(f"has islands of {self.ranks} and of {min(others)} ranks")
        enters = [one for island in self.islands for one in island.events if one["event"] == "enters"]
        if self.ranks > 1 and any(one["flags"].get("--transport") == "udp" for one in enters):
            why = (
                "islands of several ranks over --transport udp lost gradients and parameters, too, which are not in it"
            )
            raise self._wrong(why)

    def _check_arrivals(self) -> None:
        """Cut lives of a history that the run has left, and raise :class:`UsageError` if something arrived that nobody sent."""
        changed = True
        while changed:
            changed = False
            for slot, island in enumerate(self.islands):
                for life in island.lives.values():
                    if (missing := self._missing(life)) is None:
                        continue
                    sender, number, what = missing
                    again = self._began_again(sender, number)
                    if again is None:
                        why = (
                            f"{what} of island {sender} arrived at island {slot} in exchange {number}, but are not in "
                        )
                        raise self._wrong(f"{why}{self._folders[sender].name}/{exchanges_file(0)}")
                    if any(one["event"] == "leaves" and one["t"] > again for one in life.events):
                        why = f"island {sender} began again at iteration {again}, after island {slot} had gone on from there and left"
                        raise self._wrong(f"{why}: that is another run, and cannot be made again with this one")
                    life.cut(again, self._interval)
                    island.changed()
                    changed = True

    def _missing(self, life: Life) -> tuple[int, int, str] | None:
        """Something that arrived in ``life`` and was not sent: sender, exchange, and what."""
        for rank, exchanges in enumerate(life.exchanges):
            for number, one in exchanges.items():
                for sender in one.senders or ():
                    for what in (PIECES, MEANS):
                        if one.came(what, sender) and not self._sent(sender, rank, number, what, one.senders or []):
                            return sender, number, what
        return None

    def _sent(self, sender: int, rank: int, number: int, what: str, senders: Sequence[int]) -> bool:
        island = self.islands[sender]
        one = island.exchange(rank, number)
        if one is None or one.senders != senders or island.life((number + 1) * self._interval - 1) is None:
            return False
        return what == PIECES or one.pieces is not None

    def _began_again(self, slot: int, number: int) -> int | None:
        """The iteration at which the run of an island began again, if that was before exchange ``number``."""
        cuts = [one.cut_at for one in self.islands[slot].lives.values() if one.cut_at is not None]
        return min((one for one in cuts if one < (number + 1) * self._interval), default=None)

    # --- what it takes ---------------------------------------------------------------------------------------------

    def _needs(self) -> Iterator[tuple[int, int, int]]:
        """Island, iteration of its state that is needed, and the iteration of the run at which it is."""
        for slot, island in enumerate(self.islands):
            for number, life in enumerate(island.lives.values()):
                for one in life.events:
                    if one["event"] == "copied":
                        source, made = int(one["source"]), int(one["made"])
                        if made > one["t"]:
                            why = f"island {slot} had copied at {one['t']} what island {source} had at {made}"
                            raise self._wrong(why)
                        yield source, made, int(one["t"])
                    elif one["event"] == "enters" and number:
                        yield slot, int(one["at"]), int(one["t"])
                    elif one["event"] == "enters" and one["at"]:
                        why = f"island {slot} began with the checkpoint of iteration {one['at']}, of another run"
                        raise self._wrong(why)

    def _stay(self, slot: int, iteration: int) -> None:
        """Let the island of ``slot`` train until ``iteration``: it had, although it exchanged nothing more before it died."""
        if iteration == 0 or self.islands[slot].life(iteration - 1) is not None:
            return
        last = iteration - iteration % self._interval
        life = self.islands[slot].life(last - 1) if last else next(iter(self.islands[slot].lives.values()), None)
        if life is None:
            raise self._wrong(f"has no state of island {slot} after {iteration} iterations, which is needed later")
        life.reach(iteration)
        self.islands[slot].changed()

    def takers(self, rank: int, number: int, sender: int, what: str) -> int:
        """The number of islands at which ``what`` of ``sender`` arrived in an exchange."""
        found = [island.exchange(rank, number) for island in self.islands]
        return sum(one is not None and one.came(what, sender) for one in found)


@functools.lru_cache(maxsize=1)
def read_recorded(path: str, config: LossyConfig) -> Recorded:
    """The run in the folder ``path``: read once by who checks it, and by who makes it again. Raises :class:`UsageError`."""
    return Recorded(path, config)
