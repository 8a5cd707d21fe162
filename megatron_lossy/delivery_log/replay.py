"""Replay of a delivery log (docs/delivery_log.md): the losses of the recorded run happen again.

Rows of all ranks' files together give the losses of every link. If a row has a digest in place of its bitmap, its
losses are drawn again from the recorded seed and flags, and checked against the number lost and the digest.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..base.errors import UsageError, refuse
from ..base.exchange import Exchange, Stream
from ..base.registry import MECHANISMS
from ..channel import Channel, make_channel
from ..config import PHASES, LossyConfig
from .reader import BadLog, DeliveryLogFolder, Links, LogFile
from .schema import check_pyarrow, digests, pack


class Redraws:
    """Fills in the losses of rows without bitmaps."""

    def __init__(self) -> None:
        self._channels: dict[tuple[str, str], Channel] = {}

    def fill(self, links: Links, chosen: np.ndarray, exchange: Exchange, file: LogFile) -> np.ndarray:
        """Return bool[len(chosen), units]: the units that arrived on the links with the numbers ``chosen``.

        Raise ``ValueError`` if the draw differs from the record. A digest is over all links to a destination, so that
        it is checked if all of these are chosen.
        """
        arrived = links.arrived[chosen]
        open_ = np.flatnonzero(~links.known[chosen])
        if not open_.size:
            return arrived
        key = (repr(file.meta.loss), exchange.phase)
        if key not in self._channels:
            self._channels[key] = make_channel(file.meta.config.drawn_with(exchange.phase), exchange.phase)
        some = chosen[open_]
        arrived[open_] = self._channels[key].delivered_links(
            exchange, links.sources[some], links.destinations[some], arrived.shape[1]
        )
        wrong = (~arrived[open_]).sum(axis=1) != links.lost[some]
        if not wrong.any():
            wrong = self._wrong_digest(links, chosen, arrived)[open_]
        if wrong.any():
            link = some[np.flatnonzero(wrong)[0]]
            raise ValueError(
                f"phase {exchange.phase}, link {links.sources[link]} to {links.destinations[link]}: the losses drawn "
                "again from the recorded seed are not those that were recorded"
            )
        return arrived

    @staticmethod
    def _wrong_digest(links: Links, chosen: np.ndarray, arrived: np.ndarray) -> np.ndarray:
        wrong = np.zeros(len(chosen), dtype=bool)
        destinations = links.destinations[chosen]
        for rank in np.unique(destinations):
            everything = np.flatnonzero(links.destinations == rank)
            mine = np.flatnonzero(destinations == rank)
            mine = mine[np.argsort(chosen[mine])]
            if np.array_equal(chosen[mine], everything):
                [digest] = set(digests(destinations[mine], pack(arrived[mine])))
                wrong[mine] = digest != links.digest[everything[0]]
        return wrong


class Recording(Channel):
    """Loses exactly the units that a recorded run lost, whatever the seed.

    An exchange that the recorded run did not make (gradients that Megatron all-reduced, an update that an overflow
    skipped, a phase without loss) loses nothing. Raises :class:`UsageError` for an iteration without records.
    """

    def __init__(self, config: LossyConfig, path: Path) -> None:
        super().__init__(config.phase("grad"), config.loss_seed)
        check_pyarrow("--trace", path)
        self.path = path
        self._redrawn = Redraws()
        try:
            self.folder = DeliveryLogFolder(path)
            self._check_flags(config)
        except (FileNotFoundError, BadLog) as error:
            raise self._refuse(error) from None
        self._recorded = functools.cache(self._find_recorded)
        self._steps = functools.cache(self._count_steps)
        self._links = functools.lru_cache(3 * len(self.folder.ranks))(self._find_links)

    def _refuse(self, reason: object) -> UsageError:
        return refuse("--trace", self.path, str(reason))

    def _check_flags(self, config: LossyConfig) -> None:
        metas = [files[0].meta for files in self.folder.ranks.values()]
        self._config = recorded = metas[0].config
        for meta in metas[1:]:
            if meta.config != recorded:
                raise self._refuse(f"ranks {metas[0].rank} and {meta.rank} have records of different runs")
        for flag, there, here in (
            ("--loss-unit", recorded.loss_unit, config.loss_unit),
            ("--packet-bytes", recorded.packet_bytes, config.packet_bytes),
        ):
            if there != here and (flag == "--loss-unit" or config.loss_unit == "packet"):
                raise refuse(flag, here, f"the run recorded in --trace {self.path} had {there}")
        if recorded.lossy_self and not config.lossy_self:
            raise refuse("--lossy-self", "off", f"it was on in the run recorded in --trace {self.path}")

    def _find_recorded(self, stream: Stream) -> Stream:
        """Return the stream's name in the recorded run. Copies that a network distinguishes share one drawn stream."""
        return stream if self.folder.size(stream.name) else stream.drawn

    def check(self, phase: str, stream: Stream, size: int, units: int | None, steps: int | None) -> None:
        try:
            stream = self._recorded(stream)
            recorded = self.folder.size(stream.name)
            if units is not None and not recorded:
                raise self._refuse(f"has no records of {stream.name}{self._other_replay(phase)}")
            if recorded and recorded != size:
                raise self._refuse(f"is of {recorded} ranks, but the group has {size}")
            for streams in self.folder.streams.values():
                cut = streams.get(stream.name, {}).get(phase)
                if units is not None and cut is not None and cut.units != units:
                    raise self._refuse(f"has {cut.units} units per link in phase {phase}, this run has {units}")
            if recorded:
                self._check_steps(stream, recorded, steps)
        except BadLog as error:
            raise self._refuse(error) from None

    def _other_replay(self, phase: str) -> str:
        """Return advice on replaying a run that lost only in exchanges of a mechanism, and nothing in ``phase``."""
        exchanges = self._config.exchanges()
        others = [mechanism.name for mechanism in MECHANISMS.all() if set(mechanism.phases) & set(exchanges)]
        if not others or not self._config.phase(phase).lossless:
            return ""
        models = " ".join("bernoulli" if name in PHASES else "trace" for name in exchanges)
        return f"; --loss-model takes a value for each exchange: {models} replays those of {' and '.join(others)}"

    def _check_steps(self, stream: Stream, size: int, steps: int | None) -> None:
        for writer in {self._writer(stream, rank) for rank in range(size)}:
            first, last = self.folder.covered(writer)[0]
            missing = last + 1 if first == 0 else 0
            if missing < (1 if steps is None else steps):
                needs = "" if steps is None else f", the run needs {steps}"
                raise self._refuse(f"has no records of iteration {missing} of rank {writer}{needs}")

    def _writer(self, stream: Stream, destination: int) -> int:
        """Return the first rank with records of ``destination``, whose records are used. Other ranks have the same."""
        writers = self.folder.writers.get((stream.name, destination))
        if writers is None:
            raise self._refuse(f"has no records of rank {destination} of {stream.name}")
        return writers[0]

    def steps(self, phase: str, stream: Stream) -> int:
        return self._steps(self._recorded(stream))

    def _count_steps(self, stream: Stream) -> int:
        writers = {self._writer(stream, rank) for rank in range(self.folder.size(stream.name))}
        return min((self.folder.covered(writer)[-1][1] + 1 for writer in writers), default=0)

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        result = np.ones((len(sources), units), dtype=bool)
        try:
            exchange = replace(exchange, stream=self._recorded(exchange.stream))
            files: dict[LogFile, list[np.ndarray]] = {}
            for destination in np.unique(destinations).tolist():
                writer = self._writer(exchange.stream, destination)
                file = self.folder.file(writer, exchange.step)
                if file is None:
                    raise self._refuse(f"has no records of iteration {exchange.step} of rank {writer}")
                files.setdefault(file, []).append(np.flatnonzero(destinations == destination))
            for file, parts in files.items():
                places = np.concatenate(parts)
                found = self._links(file, exchange)
                if found is not None:
                    result[places] = self._of(found, file, exchange, sources[places], destinations[places])
        except BadLog as error:
            raise self._refuse(error) from None
        return result

    @staticmethod
    def _find_links(file: LogFile, exchange: Exchange) -> tuple[Links, np.ndarray] | None:
        """Return the links of an exchange, and their numbers by source and destination, -1 if there is none."""
        rows = file.exchange(exchange.step, exchange.phase, exchange.stream.name)
        if rows is None:
            return None
        links = file.links(rows)
        size = 1 + max(links.sources.max(), links.destinations.max())
        numbers = np.full((size, size), -1)
        numbers[links.sources, links.destinations] = np.arange(len(links.sources))
        return links, numbers

    def _of(
        self, found: tuple[Links, np.ndarray], file: LogFile, exchange: Exchange, sources: np.ndarray, to: np.ndarray
    ) -> np.ndarray:
        links, numbers = found
        units = links.arrived.shape[1]
        inside = (sources < len(numbers)) & (to < len(numbers))
        chosen = np.where(inside, numbers[np.where(inside, sources, 0), np.where(inside, to, 0)], -1)
        absent = (chosen < 0) & (sources != to)
        if absent.any():
            place = np.flatnonzero(absent)[0]
            raise BadLog(file.path, exchange.step, f"has no row of the link {sources[place]} to {to[place]}")
        result = np.ones((len(sources), units), dtype=bool)
        recorded = chosen >= 0  # a worker's own shard is recorded only if it can be lost
        try:
            result[recorded] = self._redrawn.fill(links, chosen[recorded], exchange, file)
        except ValueError as error:
            raise BadLog(file.path, exchange.step, error) from None
        return result
