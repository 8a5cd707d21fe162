"""The log of events besides deliveries: ``_events_RANK_FIRST_LAST.parquet`` in the folder of ``--delivery-log``.

A row is an event of an iteration: an error in a gradient, a repair, a message between pipeline stages, …
(docs/delivery_log.md#events). A mechanism adds the columns of its own events (:meth:`.Mechanism.event_columns`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..base.registry import MECHANISMS
from ..config import LossyConfig
from . import schema
from .reader import LogPath, log_files, read_file, reading
from .writer import LogWriter

if TYPE_CHECKING:
    import pyarrow

# A file is closed when it has at least this many rows, at the end of an iteration.
_MOST_ROWS = 2**16
Row = Mapping[str, Any]


def has_events(config: LossyConfig) -> bool:
    """Return whether the flags can lead to events."""
    return config.errs or any(mechanism.has_events(config) for mechanism in MECHANISMS.all())


def columns() -> pyarrow.Schema:
    """Return the columns, in order; those that an event does not need are null."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("iteration", pa.int64(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("stream", pa.string(), nullable=False),
            # Errors in reduced gradients, and the reductions in which they are drawn.
            pa.field("rank", pa.int32()),
            pa.field("bucket", pa.int32()),
            pa.field("std", pa.float64()),
            pa.field("seed", pa.uint64()),
            pa.field("elements", pa.list_(pa.int64())),
            pa.field("bits", pa.list_(pa.int8())),
            pa.field("digest", pa.binary()),
            pa.field("sizes", pa.list_(pa.int64())),
            pa.field("width", pa.int32()),
            *(column for mechanism in MECHANISMS.all() for column in mechanism.event_columns()),
        ]
    )


def content(tables: Iterable[pyarrow.Table]) -> str:
    """Return 8 bytes, hexadecimal, that differ for other rows (BLAKE2b)."""
    from hashlib import blake2b

    state = blake2b(digest_size=schema.DIGEST_BYTES)
    for table in tables:
        for name, column in zip(table.column_names, table.columns):
            if column.null_count < len(column):
                state.update(f"{name} {column.to_pylist()}".encode())
    return state.hexdigest()


class EventLog(LogWriter):
    """Writes the events of this process."""

    prefix = schema.EVENTS
    columns = staticmethod(columns)
    most = _MOST_ROWS

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for event in what:
            for row in event.rows():
                self.add(iteration, 1, {"iteration": iteration, **row})

    def tables(self, rows: list[tuple[int, int, Any]]) -> list[pyarrow.Table]:
        import pyarrow as pa

        return [pa.Table.from_pylist([row for _, _, row in rows], schema=self.columns())] if rows else []

    def note(self, tables: Iterable[pyarrow.Table], last: schema.Meta | None) -> schema.Meta:
        return schema.Meta(self.rank, __version__, schema.loss_identity(self._config), {}, content(tables))


def event_files(folder: Path) -> list[LogPath]:
    """Return the files of events in ``folder``, by rank and iteration."""
    return log_files(folder, schema.EVENTS)


def read_events(file: LogPath) -> tuple[pyarrow.Table, schema.Meta]:
    """Return the rows of ``file``, and its note. Raise :class:`BadLog`."""
    with reading(file.path, file.first):
        return read_file(file.path, columns())
