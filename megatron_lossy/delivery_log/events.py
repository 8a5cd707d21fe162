"""The log of events besides deliveries: ``_events_RANK_FIRST_LAST.parquet`` in the folder of ``--delivery-log``.

A row is an event of an iteration: an error in a gradient, a repair, a message between pipeline stages, …
:mod:`.kinds` says what they mean (docs/delivery_log.md#events).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..channel.corruption import Event
from ..config import LossyConfig
from ..errors import refuse
from . import schema
from .files import LogPath, LogWriter, log_files
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


@dataclass(frozen=True)
class EventMeta(schema.Meta):
    """A file's note about all of its rows. ``content``: of these, see :func:`content`."""

    content: str = ""


def content(tables: Iterable[pyarrow.Table]) -> str:
    """Return 8 bytes, hexadecimal, that differ for other rows (BLAKE2b)."""
    from hashlib import blake2b

    state = blake2b(digest_size=schema.DIGEST_BYTES)
    for table in tables:
        for name, column in zip(table.column_names, table.columns):
            if column.null_count < len(column):
                state.update(f"{name} {column.to_pylist()}".encode())
    return state.hexdigest()


def read_file(path: Path) -> tuple[pyarrow.Table, EventMeta]:
    """Return the rows of the file at ``path``, and its note. Raises ``OSError``, ``ValueError``, ``KeyError``, ``TypeError``."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(path, page_checksum_verification=True) as file:
        if file.schema_arrow.names != columns().names:
            raise ValueError(f"has other columns: {', '.join(file.schema_arrow.names)}")
        return file.read().cast(columns()), EventMeta.decode(file.metadata.metadata)


class EventLog(LogWriter):
    """Writes the events of this process."""

    prefix = PREFIX
    columns = staticmethod(columns)
    read = staticmethod(read_file)

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        super().__init__(config, writer)
        self._rows: list[dict[str, Any]] = []

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        self._rows += [{"iteration": iteration, **row} for event in what for row in event.rows()]

    def clear(self) -> None:
        self._rows = []

    @property
    def full(self) -> bool:
        return len(self._rows) >= _MOST_ROWS

    def take(self, end: int) -> list[pyarrow.Table]:
        import pyarrow as pa

        over = [row for row in self._rows if row["iteration"] < end]
        # Rows of the next iteration may be here: an iteration's last gather may end after messages of the next one.
        self._rows = [row for row in self._rows if row["iteration"] >= end]
        return [pa.Table.from_pylist(over, schema=self.columns())] if over else []

    def note(self, tables: Iterable[pyarrow.Table], last: schema.Meta | None) -> EventMeta:
        return EventMeta(self.rank, __version__, schema.loss_identity(self._config), {}, content(tables))


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


def read_events(file: LogPath) -> tuple[pyarrow.Table, EventMeta]:
    """Return the rows of ``file``, and its note. Raises :class:`BadLog`."""
    import pyarrow as pa

    try:
        return read_file(file.path)
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
    errors: list[Event] = []
    recorded = None
    for file in event_files(_TRACE, folder):
        try:
            table, meta = read_events(file)
            rows = [row for row in table.to_pylist() if row["kind"] in ERRORS]
            errors += map(event_of, rows)
        except (BadLog, ValueError, TypeError) as error:
            raise refuse(_TRACE, file.path, f"cannot be read: {error}") from None
        recorded = meta.loss["grad_error_at"] if meta.config.errs else recorded
        if recorded not in (None, config.grad_error_at):
            at = f"must be {recorded}, as of the errors in {file.path}"
            raise refuse("--grad-error-at", config.grad_error_at, at)
    if recorded is None:
        raise refuse(_TRACE, folder, "holds no errors that --delivery-log recorded")
    return errors
