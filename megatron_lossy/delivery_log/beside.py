"""Records of a run beside its exchanges, in files of their own in the folder of ``--delivery-log``.

Their names and their closing follow those of the delivery log: ``PREFIX_RANK_FIRST_LAST.parquet`` has the rows of one
rank for a range of iterations.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist

from ..base.errors import refuse
from ..base.files import replace_file
from ..config import LossyConfig
from ..run.monitor.observer import Look, Observer
from . import schema

if TYPE_CHECKING:
    import pyarrow

_FLAG = "--delivery-log"
#: A file is closed when it has at least this many rows, at the end of an iteration.
_MOST_ROWS = 2**16


class FileBeside(NamedTuple):
    """The rows of ``rank`` in iterations ``first`` to ``last``, inclusive."""

    path: Path
    rank: int
    first: int
    last: int


def files_beside(folder: Path, prefix: str) -> list[FileBeside]:
    """The files of ``folder`` whose names begin with ``prefix``, with their rank, first and last iteration."""
    name = re.compile(rf"{prefix}_(\d+)_(\d+)_(\d+)\.parquet")
    found = [(path, name.fullmatch(path.name)) for path in sorted(folder.iterdir())] if folder.is_dir() else []
    return [FileBeside(path, *map(int, match.groups())) for path, match in found if match]


def note_of(path: Path) -> bytes | None:
    """The note of the file at ``path`` about all of its rows."""
    import pyarrow.parquet as pq

    return (pq.read_metadata(path).metadata or {}).get(schema.KEY)


class RowsBeside(Observer):
    """Writes rows that have an iteration. ``writer``: the rank in the names of files; default that of the process."""

    #: The beginning of the names of the files.
    prefix: str

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        schema.check_pyarrow(_FLAG, config.delivery_log)
        self._config = config
        self._writer = writer
        self._folder = Path(config.delivery_log or "")
        self._rows: list[dict[str, Any]] = []
        self._first = self._end = 0
        self._checked = False

    @staticmethod
    @abstractmethod
    def columns() -> pyarrow.Schema:
        """The columns, in order; ``iteration`` is among them."""

    def note(self, table: pyarrow.Table) -> bytes | None:
        """A file's note about all of its rows, ``table``; ``None`` for none. The next file is about later rows."""
        return None

    def cut(self, note: bytes | None, table: pyarrow.Table, iteration: int) -> bytes | None:
        """The part of ``note`` that is true of ``table``, the rows before ``iteration``. Raises ``ValueError``."""
        return note

    @property
    def rank(self) -> int:
        """The rank in the names of the files."""
        if self._writer is not None:
            return self._writer
        return dist.get_rank() if dist.is_initialized() else 0

    def add(self, iteration: int, **row: Any) -> None:
        """Record a row of an iteration that is not over yet."""
        self._rows.append({"iteration": iteration, **row})

    def _check_free(self) -> None:
        """Refuse a folder with records of another run, if nobody claimed the folder."""
        self._checked = True
        if any(rank == self.rank for _, rank, *_ in files_beside(self._folder, self.prefix)):
            raise refuse(_FLAG, self._folder, "holds the log of a run; choose another folder")

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        if not self._checked:
            self._check_free()
        self._end = iteration + 1
        if self._end - self._first >= self._config.delivery_log_chunk or len(self._rows) >= _MOST_ROWS:
            self.save()

    def restart(self, iteration: int) -> None:
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        self._rows, self._first, self._end, self._checked = [], iteration, iteration, True
        for unfinished in self._folder.glob(f".{self.prefix}_{self.rank:05d}_*.tmp"):  # left by a killed run
            unfinished.unlink(missing_ok=True)
        for path, rank, first, last in files_beside(self._folder, self.prefix):
            if rank == self.rank and last >= iteration:
                if first < iteration:
                    try:
                        rows = pq.read_table(path, schema=self.columns())
                        kept = rows.filter(pc.field("iteration") < iteration)
                        note = self.cut(note_of(path), kept, iteration)
                    except (OSError, ValueError, KeyError) as error:  # Arrow's own errors are among them
                        raise refuse(_FLAG, path, f"cannot be continued: {' '.join(str(error).split())}") from None
                    self._write(first, iteration - 1, kept, note)
                path.unlink()

    def save(self) -> None:
        if self._end == self._first:
            return
        import pyarrow as pa

        over = [row for row in self._rows if row["iteration"] < self._end]
        table = pa.Table.from_pylist(over, schema=self.columns())
        self._write(self._first, self._end - 1, table, self.note(table))
        # Rows of the next iteration may be here: an iteration's last gather may end after messages of the next one.
        self._rows = [row for row in self._rows if row["iteration"] >= self._end]
        self._first = self._end

    def close(self) -> None:
        self.save()

    def _write(self, first: int, last: int, table: pyarrow.Table, note: bytes | None) -> None:
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"{self.prefix}_{self.rank:05d}_{first:09d}_{last:09d}.parquet"
        table = table.cast(self.columns())

        def write(aside: Path) -> None:
            with pq.ParquetWriter(aside, table.schema, compression="zstd", write_page_checksum=True) as writer:
                writer.write_table(table)
                if note is not None:
                    writer.add_key_value_metadata({schema.KEY: note})

        replace_file(path, write)
