"""The log of events besides deliveries: ``_events_RANK_FIRST_LAST.parquet`` in the folder of ``--delivery-log``.

A row is an event of an iteration: an error in a gradient, a repair, a message between pipeline stages, …
:mod:`.kinds` says what they mean (docs/delivery_log.md#events).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..base.errors import refuse
from ..channel.corruption import Event
from ..config import LossyConfig
from . import schema
from .files import LogPath, LogWriter, log_files, read_file
from .kinds import ERRORS, all_kinds, event_of
from .reader import BadLog

if TYPE_CHECKING:
    import pyarrow

#: Readers of Parquet folders skip such names: these rows have other columns than deliveries.
PREFIX = "_events"
#: The beginnings of the names of files in which earlier versions wrote events.
_EARLIER = ("errors", "_boundaries")
# A file is closed when it has at least this many rows, at the end of an iteration.
_MOST_ROWS = 2**16
_TRACE = "--grad-error trace"


def columns() -> pyarrow.Schema:
    """Return the columns, in order."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("iteration", pa.int64(), nullable=False),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("stream", pa.string(), nullable=False),
            *(column for kinds in all_kinds() for column in kinds.columns()),
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

    prefix = PREFIX
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


def event_files(flag: str, folder: Path) -> list[LogPath]:
    """Return the files of ``folder``, by rank and iteration. Raises :class:`UsageError` for ``flag`` if some are of an earlier format."""
    for prefix in _EARLIER:
        for file in log_files(folder, prefix):
            raise refuse(
                flag,
                folder,
                f"{file.path.name} has an earlier format of events than {PREFIX}_RANK_FIRST_LAST.parquet; read it with the "
                "version that wrote it, or move it away",
            )
    return log_files(folder, PREFIX)


def read_events(file: LogPath) -> tuple[pyarrow.Table, schema.Meta]:
    """Return the rows of ``file``, and its note. Raises :class:`BadLog`."""
    import pyarrow as pa

    try:
        return read_file(file.path, columns())
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise BadLog(file.path, file.first, error) from None


def recorded_events(config: LossyConfig) -> list[Event]:
    """Return the errors that ``--grad-error trace:FOLDER`` names; none without it.

    Raises :class:`UsageError` if they cannot be read, or happened at another place than ``--grad-error-at`` says.
    """
    if config.error_kind != "trace":
        return []
    assert config.error_folder is not None
    folder = Path(config.error_folder)
    schema.check_pyarrow(_TRACE, folder)
    import pyarrow.compute as pc

    errors: list[Event] = []
    recorded = None
    for file in event_files(_TRACE, folder):
        try:
            table, meta = read_events(file)
            errors += map(event_of, table.filter(pc.field("kind").isin(ERRORS)).to_pylist())
            recorded = meta.config.grad_error_at if meta.config.errs else recorded
        except (BadLog, ValueError, TypeError) as error:
            raise refuse(_TRACE, file.path, f"cannot be read: {error}") from None
        if recorded not in (None, config.grad_error_at):
            at = f"must be {recorded}, as of the errors in {file.path}"
            raise refuse("--grad-error-at", config.grad_error_at, at)
    if recorded is None:
        raise refuse(_TRACE, folder, "holds no errors that --delivery-log recorded")
    return errors
