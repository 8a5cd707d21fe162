"""The log of errors in reduced gradients and of what was done about replicas that differ (docs/corruption.md).

Beside the delivery log, in files of their own: ``errors_RANK_FIRST_LAST.parquet``. ``--grad-error trace`` replays them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..channel.corruption import Event, Hit
from ..config import LossyConfig
from ..errors import refuse
from ..exchange import Stream
from . import schema
from .beside import RowsBeside, files_beside

if TYPE_CHECKING:
    import pyarrow

_PREFIX = "errors"
_FLAG = "--grad-error-trace"
#: Kinds of rows that are errors; the others say what was done about replicas that differ.
ERRORS = ("gaussian", "bit-flip")


def errors_schema() -> pyarrow.Schema:
    """The columns, in order."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("iteration", pa.int64(), nullable=False),
            pa.field("stream", pa.string(), nullable=False),
            pa.field("bucket", pa.int32()),
            pa.field("rank", pa.int32()),
            pa.field("kind", pa.string(), nullable=False),
            pa.field("std", pa.float64()),
            pa.field("seed", pa.uint64()),
            pa.field("elements", pa.list_(pa.int64())),
            pa.field("bits", pa.list_(pa.int8())),
            pa.field("digest", pa.binary()),
            pa.field("repaired", pa.string()),
            pa.field("interval", pa.int32()),
            pa.field("divergence", pa.float64()),
        ]
    )


def error_files(folder: Path) -> list[tuple[Path, int, int, int]]:
    """The files of ``folder`` with their rank, first and last iteration, inclusive."""
    return files_beside(folder, _PREFIX)


def check_recorded_errors(config: LossyConfig) -> list[Path]:
    """The files that ``--grad-error-trace`` names; none without it. Raises :class:`UsageError`."""
    if config.grad_error != "trace":
        return []
    assert config.grad_error_trace is not None
    folder = Path(config.grad_error_trace)
    schema.check_pyarrow(_FLAG, folder)
    files = [path for path, *_ in error_files(folder)]
    if not files:
        raise refuse(_FLAG, folder, "holds no errors that --delivery-log recorded")
    return files


def recorded_events(config: LossyConfig) -> list[Event]:
    """The errors that ``--grad-error-trace`` names; none without it. Raises :class:`UsageError`."""
    return [event for path in check_recorded_errors(config) for event, _ in read_events(path)]


def read_events(path: Path) -> list[tuple[Event, bytes]]:
    """The errors in the file at ``path``, with the digests of what they left. Raises :class:`UsageError`."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        rows = pq.read_table(path, schema=errors_schema()).to_pylist()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise refuse(_FLAG, path, f"cannot be read: {' '.join(str(error).split())}") from None
    return [
        (
            Event(
                row["iteration"],
                Stream.parse(row["stream"]),
                row["bucket"],
                row["rank"],
                row["kind"],
                std=row["std"],
                seed=row["seed"],
                elements=tuple(row["elements"]),
                bits=tuple(row["bits"]),
            ),
            row["digest"],
        )
        for row in rows
        if row["kind"] in ERRORS
    ]


class ErrorLog(RowsBeside):
    """Writes the errors of this process, and what it did, into the folder of ``--delivery-log``."""

    prefix = _PREFIX
    columns = staticmethod(errors_schema)

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for one in what:
            for row in [_row_of_hit(one)] if isinstance(one, Hit) else one.rows():
                self.add(iteration, **row)


def _row_of_hit(hit: Hit) -> dict[str, Any]:
    event = hit.event
    return {
        "stream": event.stream.name,
        "bucket": event.bucket,
        "rank": event.rank,
        "kind": event.kind,
        "std": event.std,
        "seed": event.seed,
        "elements": list(event.elements),
        "bits": list(event.bits),
        "digest": hit.digest,
    }
