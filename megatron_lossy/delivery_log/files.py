"""The files of a log, one writer of them: ``PREFIX_RANK_FIRST_LAST.parquet`` has the rows of a rank for a range of iterations."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch.distributed as dist

from ..base.errors import refuse
from ..base.files import replace_file
from ..base.flags import difference
from ..config import LossyConfig
from ..run.monitor.observer import Look, Observer
from . import schema

if TYPE_CHECKING:
    import pyarrow

_FLAG = "--delivery-log"


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
    """Return the rows of a file, and its note. Raises ``OSError``, ``ValueError``, ``KeyError``, ``TypeError``."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if file.schema_arrow.names != columns.names:
            raise ValueError(f"has other columns: {', '.join(file.schema_arrow.names)}")
        return file.read().cast(columns), schema.Meta.decode(file.metadata.metadata)


class LogWriter(Observer, ABC):
    """Writes files of one kind. ``writer``: the rank in their names, if several writers share a process; default its own.

    A file is closed after ``--delivery-log-chunk`` iterations, before a checkpoint, or when it has grown large.
    """

    #: The beginning of the names of the files, and the size at which one is closed.
    prefix: ClassVar[str]
    most: ClassVar[int]

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        schema.check_pyarrow(_FLAG, config.delivery_log)
        self._config = config
        self._writer = writer
        self._folder = Path(config.delivery_log or "")
        self._first = 0  # iterations from here on are not on disk yet
        self._end = 0  # the iteration after the last one that is over
        self._checked = False
        self._size = 0
        self._rows: list[tuple[int, int, Any]] = []  # iteration, size, and what is recorded

    @staticmethod
    @abstractmethod
    def columns() -> pyarrow.Schema:
        """Return the columns, in order; ``iteration`` is the first."""

    @abstractmethod
    def tables(self, rows: list[tuple[int, int, Any]]) -> Iterable[pyarrow.Table]:
        """Return ``rows``, as they were added, in a table for each row group."""

    @abstractmethod
    def note(self, tables: Iterable[pyarrow.Table], last: schema.Meta | None) -> schema.Meta:
        """Return the note of a file about its rows, ``tables``. ``last``: the note of the file that they were cut from."""

    def add(self, iteration: int, size: int, row: Any) -> None:
        """Record ``row`` of an iteration that is not over."""
        self._rows.append((iteration, size, row))
        self._size += size

    @property
    def rank(self) -> int:
        """The rank in the names of the files."""
        if self._writer is not None:
            return self._writer
        return dist.get_rank() if dist.is_initialized() else 0

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        self._check_free()
        self._end = iteration + 1
        if self._end - self._first >= self._config.delivery_log_chunk or self._size >= self.most:
            self.save()

    def restart(self, iteration: int) -> None:
        self._rows, self._size = [], 0
        self._first = self._end = iteration
        self._checked = True
        for unfinished in self._folder.glob(f".{self.prefix}_{self.rank:05d}_*.tmp"):  # left by a killed run
            unfinished.unlink(missing_ok=True)
        for file in self._own_files():
            if file.last >= iteration:
                if file.first < iteration:
                    self._cut(file, iteration)
                file.path.unlink()

    def save(self) -> None:
        """Close the file of all iterations that are over."""
        if self._end > self._first:
            over = [row for row in self._rows if row[0] < self._end]
            self._write(self._first, self._end - 1, self.tables(over))
            # Rows of the next iteration may be here: an iteration's last gather may end after messages of the next one.
            self._rows = [row for row in self._rows if row[0] >= self._end]
            self._size = sum(size for _, size, _ in self._rows)
            self._first = self._end

    def close(self) -> None:
        self.save()

    def _check_free(self) -> None:
        """Refuse, once, a folder with records of another run, if nobody claimed the folder."""
        if not self._checked and self._own_files():
            raise refuse(_FLAG, self._folder, "holds the log of a run; choose another folder")
        self._checked = True

    def _own_files(self) -> list[LogPath]:
        return [file for file in log_files(self._folder, self.prefix) if file.rank == self.rank]

    def _cut(self, file: LogPath, iteration: int) -> None:
        """Write the rows of ``file`` before ``iteration`` into a file of their own."""
        import pyarrow.compute as pc

        try:
            table, meta = read_file(file.path, self.columns())
        except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's own errors are among them
            raise refuse(_FLAG, file.path, f"cannot be continued: {' '.join(str(error).split())}") from None
        if difference(LossyConfig, meta.loss, schema.loss_identity(self._config)):
            raise refuse(_FLAG, file.path, "is of a run with other loss flags; choose another folder")
        kept = table.filter(pc.field("iteration") < iteration)
        self._write(file.first, iteration - 1, [kept] if len(kept) else [], meta)

    def _write(self, first: int, last: int, tables: Iterable[pyarrow.Table], meta: schema.Meta | None = None) -> None:
        """Write a file aside, a row group per table, and give it its name once it is whole."""
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        note = self.note(tables, meta).encode()

        def write(aside: Path) -> None:
            # Arrow's own schema would take a kilobyte of every file, and these columns do not need it.
            with pq.ParquetWriter(
                aside,
                self.columns(),
                compression="zstd",
                write_statistics=["iteration"],
                write_page_checksum=True,
                store_schema=False,
            ) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=2**31)
                writer.add_key_value_metadata(note)

        replace_file(self._folder / schema.file_name(self.rank, first, last, self.prefix), write)
