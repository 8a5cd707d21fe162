"""Reads a delivery log: its files, and the rows of an exchange.

Files are opened when they are needed and decoded one row group at a time, so that the part before a corrupt or
truncated file can be used.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from . import schema
from .schema import ALL_BUCKETS, Meta, PhaseCut, arrow_schema, unpack

if TYPE_CHECKING:
    import pyarrow


class LogPath(NamedTuple):
    """The path of the rows of ``rank`` in iterations ``first`` to ``last``, inclusive."""

    path: Path
    rank: int
    first: int
    last: int


def log_files(folder: Path, prefix: str = schema.PREFIX) -> list[LogPath]:
    """Return the files of ``folder`` whose names begin with ``prefix``, by rank and iteration."""
    name = re.compile(rf"{prefix}_(\d+)_(\d+)_(\d+)\.parquet")
    found = [(path, name.fullmatch(path.name)) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return [LogPath(path, *map(int, match.groups())) for path, match in found if match]


def read_file(path: Path, columns: pyarrow.Schema) -> tuple[pyarrow.Table, schema.Meta]:
    """Return the rows of a file, and its note. Raise ``OSError``, ``ValueError``, ``KeyError``, ``TypeError``."""
    with _open(path, columns) as file:
        return file.read().cast(columns), schema.Meta.decode(file.metadata.metadata)


def _open(path: Path, columns: pyarrow.Schema, **options: Any) -> Any:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, page_checksum_verification=True, **options)
    if file.schema_arrow.names != columns.names:
        raise ValueError(f"has other columns: {', '.join(file.schema_arrow.names)}")
    return file


class BadLog(Exception):
    """A file that cannot be used from ``iteration`` on. That iteration's first record is row ``row`` of the file."""

    def __init__(self, path: Path, iteration: int, reason: object, row: int = 0) -> None:
        super().__init__(f"{path.name}, row {row}, iteration {iteration}: {' '.join(str(reason).split())}")
        self.path, self.iteration = path, iteration


@contextlib.contextmanager
def reading(path: Path, iteration: int, row: int = 0) -> Iterator[None]:
    """Return a context in which the errors of a file, from ``iteration`` and ``row`` on, become :class:`BadLog`."""
    import pyarrow as pa

    try:
        yield
    except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
        raise BadLog(path, iteration, error, row) from None


@dataclass(frozen=True)
class LogRows:
    """Consecutive rows of a file, the columns as arrays. ``first``: number of the first one in the file.

    ``phase`` and ``stream`` are words; ``bitmap`` and ``digest`` are Arrow arrays of bytes, null if there is none.
    """

    first: int
    iteration: np.ndarray
    phase: np.ndarray
    stream: np.ndarray
    bucket: np.ndarray
    source: np.ndarray
    destination: np.ndarray
    units: np.ndarray
    lost: np.ndarray
    bitmap: Any
    digest: Any

    def __len__(self) -> int:
        return len(self.iteration)

    def __getitem__(self, part: slice) -> LogRows:
        columns = {name: getattr(self, name)[part] for name in arrow_schema().names}
        return LogRows(self.first + part.start, **columns)

    @cached_property
    def exchanges(self) -> dict[tuple[int, str, str], slice]:
        """The rows of each exchange by iteration, phase and stream, in the order of the file."""
        if not len(self):
            return {}
        changes = np.zeros(len(self) - 1, dtype=bool)
        for column in (self.iteration, self.phase, self.stream):
            changes |= column[1:] != column[:-1]
        edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self)]
        return {
            (int(self.iteration[a]), str(self.phase[a]), str(self.stream[a])): slice(a, b)
            for a, b in itertools.pairwise(edges)
        }


@dataclass(frozen=True)
class Links:
    """A file's records of one exchange, link by link: ``sources`` and ``destinations`` integers [L].

    ``arrived`` bool[L, units] is right where ``known`` bool[L]; elsewhere ``lost`` [L] units did not arrive, and
    ``digest`` [L] is over all links of the destination.
    """

    sources: np.ndarray
    destinations: np.ndarray
    arrived: np.ndarray
    known: np.ndarray
    lost: np.ndarray
    digest: np.ndarray

    @classmethod
    def of(cls, rows: LogRows, cut: PhaseCut) -> Links:
        """Return the links of one exchange's rows, with units as in ``cut``. Raise ``ValueError`` if these differ."""
        import pyarrow as pa

        count = np.flatnonzero((rows.source != rows.source[0]) | (rows.destination != rows.destination[0]))
        parts = int(count[0]) if count.size else len(rows)  # rows of a link: one for each bucket, or one for all
        buckets = rows.bucket[:parts]
        shape = (len(rows) // parts, parts)
        if len(rows) % parts or (rows.bucket.reshape(shape) != buckets).any():
            raise ValueError("its rows are not one for every link and bucket")
        links = rows.source.reshape(shape)[:, 0], rows.destination.reshape(shape)[:, 0]
        units, lost = rows.units.reshape(shape), rows.lost.reshape(shape)
        known = np.asarray(rows.bitmap.is_valid()).reshape(shape)
        arrived = np.ones((shape[0], cut.units), dtype=bool)
        for k, bucket in enumerate(buckets.tolist()):
            first, size = (0, cut.units) if bucket == ALL_BUCKETS else cut.buckets[bucket][:2]
            if (units[:, k] != size).any():
                raise ValueError(f"bucket {bucket} has {size} units, its rows say {units[0, k]}")
            chosen = np.flatnonzero(known[:, k])
            if chosen.size:
                bitmaps = _bytes(rows.bitmap.take(pa.array(chosen * parts + k, pa.int64())), -(-size // 8))
                arrived[chosen, first : first + size] = unpack(bitmaps, size)
                wrong = np.flatnonzero((~arrived[chosen, first : first + size]).sum(axis=1) != lost[chosen, k])
                if wrong.size:
                    raise ValueError(f"row {rows.first + chosen[wrong[0]] * parts + k}: bitmap and lost do not agree")
        lost = lost.sum(axis=1)
        digest = np.array(rows.digest.to_pylist(), dtype=object).reshape(shape)[:, 0]
        return cls(*links, arrived, known.all(axis=1) | (lost == 0), lost, digest)


def _bytes(values: Any, width: int) -> np.ndarray:
    """Return uint8[n, width] of an Arrow array of n byte strings. Raise ``ValueError`` for other lengths."""
    _, offsets, data = values.buffers()
    ends = np.frombuffer(offsets, dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    if (np.diff(ends) != width).any():
        raise ValueError(f"a bitmap is not {width} bytes long")
    return np.frombuffer(data, dtype=np.uint8)[ends[0] : ends[-1]].reshape(len(values), width)


class LogFile(LogPath):
    """One file of the log."""

    _kept: tuple[int, LogRows] | None = None

    @cached_property
    def _parquet(self) -> Any:
        with reading(self.path, self.first):
            return _open(self.path, arrow_schema(), read_dictionary=["phase", "stream"])

    @cached_property
    def meta(self) -> Meta:
        """The file's note about all of its rows. Raises :class:`BadLog`."""
        with reading(self.path, self.first):
            return Meta.decode(self._parquet.metadata.metadata)

    @cached_property
    def groups(self) -> list[tuple[int, int, int]]:
        """(first iteration, last iteration, number of the first row) of every row group. Raises :class:`BadLog`."""
        metadata = self._parquet.metadata
        result, row = [], 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            statistics = group.column(0).statistics  # a group without rows has none
            first, last = (statistics.min, statistics.max) if group.num_rows else (self.first, self.first - 1)
            result.append((first, last, row))
            row += group.num_rows
        return result

    def read(self, group: int) -> LogRows:
        """Return the rows of a row group; the last one read is kept. Raise :class:`BadLog`."""
        if self._kept is None or self._kept[0] != group:
            iteration, _, row = self.groups[group]
            with reading(self.path, iteration, row):
                self._kept = group, _rows(self._parquet.read_row_group(group), row)
        return self._kept[1]

    def links(self, rows: LogRows) -> Links:
        """Return the links of the rows of one exchange. Raise :class:`BadLog`."""
        iteration, phase, stream = next(iter(rows.exchanges))
        with reading(self.path, iteration, rows.first):
            return Links.of(rows, self.meta.streams[stream][phase])

    def exchange(self, iteration: int, phase: str, stream: str) -> LogRows | None:
        """Return the rows of one exchange; ``None`` if it has none. Raise :class:`BadLog`."""
        for number, (first, last, _) in enumerate(self.groups):
            if first <= iteration <= last:
                rows = self.read(number)
                part = rows.exchanges.get((iteration, phase, stream))
                return rows[part] if part is not None else None
        return None


def _rows(table: Any, first: int) -> LogRows:
    columns = {}
    for name in table.column_names:
        column = table.column(name).combine_chunks()
        if name in ("bitmap", "digest"):
            columns[name] = column
        elif name in ("phase", "stream"):
            words = np.array(column.dictionary.to_pylist(), dtype=object)
            columns[name] = words[column.indices.to_numpy(zero_copy_only=False)]
        else:
            columns[name] = column.to_numpy(zero_copy_only=False)
    return LogRows(first, **columns)


class DeliveryLogFolder:
    """The files of a delivery log, by rank and in the order of iterations. Raises ``FileNotFoundError`` without any."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ranks: OrderedDict[int, list[LogFile]] = OrderedDict()
        for file in log_files(path):
            self.ranks.setdefault(file.rank, []).append(LogFile(*file))
        if not self.ranks:
            raise FileNotFoundError(f"{path} holds no delivery log")

    @property
    def files(self) -> list[LogFile]:
        """All files, rank by rank."""
        return [file for files in self.ranks.values() for file in files]

    def covered(self, rank: int) -> list[tuple[int, int]]:
        """Return the inclusive ranges of iterations that ``rank`` has records of."""
        result: list[tuple[int, int]] = []
        for file in self.ranks[rank]:
            if result and file.first <= result[-1][1] + 1:
                result[-1] = (result[-1][0], max(result[-1][1], file.last))
            else:
                result.append((file.first, file.last))
        return result

    def file(self, rank: int, iteration: int) -> LogFile | None:
        """Return the file with the records of ``rank`` for ``iteration``, if there is one."""
        files = self.ranks[rank]
        number = bisect.bisect_right(files, iteration, key=lambda file: file.first) - 1
        return files[number] if number >= 0 and iteration <= files[number].last else None

    @cached_property
    def streams(self) -> dict[int, dict[str, dict[str, Any]]]:
        """The first cut in each rank's files, by rank, stream and phase. Raises :class:`BadLog` for its first file.

        A file has the streams that were exchanged until it was written, so that the first one may lack some. Later
        files that cannot be read are skipped; reading their rows raises an error.
        """
        result: dict[int, dict[str, dict[str, Any]]] = {}
        for rank, files in self.ranks.items():
            found = result.setdefault(rank, {})
            for file in files:
                try:
                    streams = file.meta.streams
                except BadLog:
                    if file is files[0]:
                        raise
                    continue
                for name, phases in streams.items():
                    found[name] = phases | found.get(name, {})
        return result

    @cached_property
    def writers(self) -> dict[tuple[str, int], list[int]]:
        """The ranks whose files have the rows of each stream and destination. Raises :class:`BadLog`."""
        result: dict[tuple[str, int], list[int]] = {}
        for rank, streams in self.streams.items():
            for name, phases in streams.items():
                for destination in {rank for cut in phases.values() for rank in cut.receivers}:
                    result.setdefault((name, destination), []).append(rank)
        return result

    def size(self, stream: str) -> int:
        """Return ranks of the full group of ``stream``; 0 if there is no such stream. Raise :class:`BadLog`."""
        cuts = (cut for streams in self.streams.values() for cut in streams.get(stream, {}).values())
        return max((1 + max(*cut.sources, *cut.receivers) for cut in cuts), default=0)
