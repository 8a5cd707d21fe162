"""The format of the log of errors in gradients, and of what mechanisms do about them (docs/corruption.md).

It is beside the delivery log, in files of its own: ``errors_RANK_FIRST_LAST.parquet``. :mod:`.error_log` writes them,
``--grad-error trace`` replays them, and :mod:`.verify_errors` draws them again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.errors import refuse
from ..base.exchange import Stream
from ..base.registry import MECHANISMS
from ..channel.corruption import Event
from ..config import LossyConfig
from . import schema
from .beside import FileBeside, files_beside

if TYPE_CHECKING:
    import pyarrow

PREFIX = "errors"
_FLAG = "--grad-error trace"
#: Kinds of rows that are errors. Other rows are errors without effect, or actions of mechanisms.
ERRORS = ("gaussian", "bit-flip")
SPARED = "spared"


def errors_schema() -> pyarrow.Schema:
    """The columns, in order; the last ones are of rows about actions of mechanisms."""
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
            *(column for mechanism in MECHANISMS.all() for column in mechanism.columns()),
        ]
    )


@dataclass
class Reduced:
    """The gradients of one stream that one rank received. ``sizes``, ``width``: see :class:`Reduction`.

    ``iterations``: the inclusive ranges in which they were reduced.
    """

    sizes: list[int]
    width: int
    iterations: list[tuple[int, int]] = field(default_factory=list)

    def add(self, iteration: int) -> None:
        """Add ``iteration``, later than all others, in which the gradients were reduced."""
        if self.iterations and self.iterations[-1][1] == iteration - 1:
            self.iterations[-1] = (self.iterations[-1][0], iteration)
        else:
            self.iterations.append((iteration, iteration))

    def before(self, iteration: int) -> Reduced:
        """The same without reductions from ``iteration`` on."""
        kept = [(first, min(last, iteration - 1)) for first, last in self.iterations if first < iteration]
        return dataclasses.replace(self, iterations=kept)


@dataclass(frozen=True)
class ErrorMeta:
    """A file's note about all of its rows.

    ``loss``: the flags of the run. ``streams``: by name, then by rank in the group. ``content``: hexadecimal, see
    :func:`content`.
    """

    rank: int
    version: str
    loss: Mapping[str, Any]
    streams: dict[str, dict[int, Reduced]]
    content: str

    def encode(self) -> bytes:
        """The note as bytes."""
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def decode(cls, note: bytes | None) -> ErrorMeta:
        """The inverse of :meth:`encode`. Raises ``ValueError``, ``KeyError``."""
        if note is None:
            raise ValueError("it says nothing about the run that wrote it")
        values = json.loads(note)
        streams = {
            name: {
                int(rank): Reduced(one["sizes"], one["width"], [tuple(part) for part in one["iterations"]])
                for rank, one in ranks.items()
            }
            for name, ranks in values["streams"].items()
        }
        return cls(values["rank"], values["version"], values["loss"], streams, values["content"])


def content(table: pyarrow.Table) -> str:
    """8 bytes, hexadecimal, that tell the rows of ``table`` from others (BLAKE2b)."""
    from hashlib import blake2b

    state = blake2b(digest_size=schema.DIGEST_BYTES)
    for row in table.to_pylist():
        state.update(repr(tuple(row.values())).encode())
    return state.hexdigest()


def error_files(folder: Path) -> list[FileBeside]:
    """The files of ``folder`` with their rank, first and last iteration, inclusive."""
    return files_beside(folder, PREFIX)


def recorded_events(config: LossyConfig) -> list[Event]:
    """The errors that ``--grad-error trace:FOLDER`` names; none without it.

    Raises :class:`UsageError` if they cannot be read, or happened at another place than ``--grad-error-at`` says.
    """
    if config.error_kind != "trace":
        return []
    assert config.error_folder is not None
    folder = Path(config.error_folder)
    schema.check_pyarrow(_FLAG, folder)
    events, files = [], error_files(folder)
    if not files:
        raise refuse(_FLAG, folder, "holds no errors that --delivery-log recorded")
    for path, *_ in files:
        events += read_events(path, config.grad_error_at)
    return events


def read_errors(path: Path) -> tuple[pyarrow.Table, ErrorMeta]:
    """The rows of the file at ``path``, and its note about them.

    Raises ``ValueError`` if they cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            return file.read().cast(errors_schema()), ErrorMeta.decode((file.metadata.metadata or {}).get(schema.KEY))
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise ValueError(" ".join(str(error).split())) from None


def event_of(row: Mapping[str, Any]) -> Event:
    """The error in a row of one of the kinds :data:`ERRORS`. Raises ``ValueError``, ``TypeError``."""
    stream = Stream.parse(row["stream"])
    elements, bits = tuple(row["elements"]), tuple(row["bits"])
    return Event(
        row["iteration"], stream, row["bucket"], row["rank"], row["kind"],
        std=row["std"], seed=row["seed"], elements=elements, bits=bits, digest=row["digest"],
    )  # fmt: skip


def read_events(path: Path, at: str | None = None) -> list[Event]:
    """The errors in the file at ``path``. Raises :class:`UsageError`, also if they were not recorded with ``at``."""
    try:
        table, meta = read_errors(path)
        events = [event_of(row) for row in table.to_pylist() if row["kind"] in ERRORS]
    except (ValueError, TypeError) as error:
        raise refuse(_FLAG, path, f"cannot be read: {error}") from None
    recorded = meta.loss["grad_error_at"]
    if at not in (None, recorded):
        raise refuse("--grad-error-at", at, f"must be {recorded}, as of the errors in {path}")
    return events
