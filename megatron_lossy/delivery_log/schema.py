"""The format of the delivery log (docs/delivery_log.md): columns, names of files, metadata.

The log is a folder of Parquet files, each with the rows of one writing rank and a range of iterations, and
``_run.json``, which names the run of these records. Readers of Parquet folders skip names that begin with an underscore
or a dot.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.errors import check_package
from ..base.flags import identity, of_flags
from ..config import LossyConfig

if TYPE_CHECKING:
    import pyarrow

#: The format is 2 since streams may have a tensor-parallel rank. Files of format 1 have none, and can be read.
FORMAT = 2
RUN = "_run.json"
#: The bucket of a row whose units are those of all buckets of its stream.
ALL_BUCKETS = -1
DIGEST_BYTES = 8

#: The beginning of the names of files of deliveries.
PREFIX = "rank"
#: That of files of events. Readers of Parquet folders skip such names: these rows have other columns than deliveries.
EVENTS = "_events"
#: The key of this package's part of a file's key-value metadata.
KEY = b"megatron_lossy"


def check_pyarrow(flag: str, value: object) -> None:
    """Raise :class:`UsageError` unless the package pyarrow is installed."""
    check_package("pyarrow", flag, value, "'megatron-lossy[log]'")


def arrow_schema() -> pyarrow.Schema:
    """Return the columns, in order."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("iteration", pa.int64(), nullable=False),
            pa.field("phase", pa.string(), nullable=False),
            pa.field("stream", pa.string(), nullable=False),
            pa.field("bucket", pa.int32(), nullable=False),
            pa.field("source", pa.int32(), nullable=False),
            pa.field("destination", pa.int32(), nullable=False),
            pa.field("units", pa.int32(), nullable=False),
            pa.field("lost", pa.int32(), nullable=False),
            pa.field("bitmap", pa.binary()),
            pa.field("digest", pa.binary()),
        ]
    )


def file_name(rank: int, first: int, last: int, prefix: str = PREFIX) -> str:
    """Return the name of the file with iterations ``first`` to ``last`` (inclusive) that ``rank`` wrote."""
    return f"{prefix}_{rank:05d}_{first:09d}_{last:09d}.parquet"


@dataclass(frozen=True)
class PhaseCut:
    """One phase of one stream as a rank saw it.

    ``sources``, ``receivers``: ranks of the full group. ``units``: units per link. ``buckets``: for each bucket the
    number of its first unit, its units, elements of its shard and of a unit.
    """

    sources: Sequence[int]
    receivers: Sequence[int]
    units: int
    buckets: Sequence[Sequence[int]]


@dataclass(frozen=True)
class Meta:
    """A file's note about all of its rows. ``streams``: by name, then by phase. ``loss``: the flags of the run.

    ``content``: 8 bytes, hexadecimal, that differ for other rows; only of events.
    """

    rank: int
    version: str
    loss: dict[str, Any]
    streams: dict[str, dict[str, PhaseCut]]
    content: str | None = None

    def encode(self) -> dict[bytes, bytes]:
        """Return the note as key-value metadata of a Parquet file."""
        values = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {KEY: json.dumps({"format": FORMAT, **values}).encode()}

    @classmethod
    def decode(cls, metadata: dict[bytes, bytes] | None) -> Meta:
        """Return the inverse of :meth:`encode`. Raise ``ValueError`` for metadata that is no delivery log's."""
        if KEY not in (metadata or {}):
            raise ValueError("is no file of a delivery log")
        values = json.loads(metadata[KEY])
        if values.pop("format") not in range(1, FORMAT + 1):
            raise ValueError(f"has a later format than {FORMAT}")
        streams = {
            name: {phase: PhaseCut(**cut) for phase, cut in phases.items()}
            for name, phases in values.pop("streams").items()
        }
        return cls(**values, streams=streams)

    @property
    def config(self) -> LossyConfig:
        """The loss flags of the run, also of an earlier version: a flag that came later had its default."""
        return of_flags(LossyConfig, self.loss)


def loss_identity(config: LossyConfig) -> dict[str, Any]:
    """Return the loss flags that identify a run, as JSON gives them back."""
    return json.loads(json.dumps(identity(config)))


def digests(destinations: np.ndarray, bitmaps: np.ndarray) -> list[bytes]:
    """Return the digest, for every row, of all rows with its destination: BLAKE2b of their bitmaps, one after another.

    ``destinations`` integers [L]; ``bitmaps`` uint8[L, bytes], the rows of a destination in the order of sources.
    """
    from hashlib import blake2b

    known = {}
    for rank in np.unique(destinations):
        known[int(rank)] = blake2b(bitmaps[destinations == rank].tobytes(), digest_size=DIGEST_BYTES).digest()
    return [known[rank] for rank in destinations.tolist()]


def pack(arrived: np.ndarray) -> np.ndarray:
    """Return uint8[L, ceil(units / 8)] of ``arrived`` bool[L, units]: unit u is bit u % 8 of byte u // 8."""
    return np.packbits(arrived, axis=1, bitorder="little")


def unpack(bitmaps: np.ndarray, units: int) -> np.ndarray:
    """Return the inverse of :func:`pack`."""
    return np.unpackbits(bitmaps, axis=1, count=units, bitorder="little").view(bool)
