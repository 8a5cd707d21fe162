"""The log of losses in messages between pipeline stages (docs/delivery_log.md#stage-boundaries).

It is beside the delivery log, in files of its own: ``_boundaries_RANK_FIRST_LAST.parquet``, a row for each message of
training that a rank received. For losses of a network the packets that became zeros are recorded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ... import __version__
from ...base.exchange import Stream
from ...config import LossyConfig
from ...delivery_log import schema
from ...delivery_log.beside import RowsBeside, files_beside, note_of
from ...delivery_log.reader import BadLog
from .loss import Boundary, Fate
from .messages import Message
from .monitor import BoundaryObserver

if TYPE_CHECKING:
    import pyarrow

#: Readers of Parquet folders skip such names: these rows have other columns than the delivery log.
PREFIX = "_boundaries"
FORMAT = 1


def columns() -> pyarrow.Schema:
    """The columns, in order."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("iteration", pa.int64(), nullable=False),
            pa.field("phase", pa.string(), nullable=False),
            pa.field("stream", pa.string(), nullable=False),
            pa.field("message", pa.int32(), nullable=False),
            pa.field("packets", pa.int32(), nullable=False),
            pa.field("lost", pa.int32(), nullable=False),
            pa.field("repaired", pa.int32(), nullable=False),
            pa.field("again", pa.bool_(), nullable=False),
            pa.field("zeros", pa.int32(), nullable=False),
            pa.field("bitmap", pa.binary()),
        ]
    )


class BoundaryLog(RowsBeside, BoundaryObserver):
    """Writes the losses of the messages that this process received."""

    prefix = PREFIX
    columns = staticmethod(columns)

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        super().__init__(config, writer)
        self._bitmaps = config.delivery_log_bitmaps or config.act_transport == "udp"
        self._layers: dict[str, tuple[int, int]] = {}  # by stream: layers before the boundary, and of the model

    def crossed(self, message: Message, fate: Fate) -> None:
        if message.evaluation:
            return
        name, zeros = message.stream.name, int(fate.lost.sum())
        self._layers[name] = message.boundary.layer, message.boundary.layers
        self.add(
            message.step,
            phase=message.phase,
            stream=name,
            message=message.number,
            packets=len(fate.lost),
            lost=fate.raw,
            repaired=fate.raw - fate.residual,
            again=fate.again,
            zeros=zeros,
            bitmap=schema.pack(~fate.lost[None])[0].tobytes() if zeros and self._bitmaps else None,
        )

    def note(self, table: pyarrow.Table) -> bytes:
        loss = schema.loss_identity(self._config)
        return json.dumps(
            {"format": FORMAT, "rank": self.rank, "version": __version__, "loss": loss, "layers": self._layers}
        ).encode()


@dataclass(frozen=True)
class Crossings:
    """The messages of one iteration, phase and stream, in the order of their records. Arrays [M].

    ``bitmaps``: bytes or ``None``.
    """

    iteration: int
    phase: str
    stream: str
    message: np.ndarray
    packets: np.ndarray
    lost: np.ndarray
    repaired: np.ndarray
    again: np.ndarray
    zeros: np.ndarray
    bitmaps: list[bytes | None]


class BoundaryFile:
    """One file: the messages that ``rank`` received in iterations ``first`` to ``last``, inclusive."""

    def __init__(self, path: Path, rank: int, first: int, last: int) -> None:
        self.path, self.rank, self.first, self.last = path, rank, first, last

    def bad(self, iteration: int, reason: object) -> BadLog:
        """The error for a file that cannot be used from ``iteration`` on."""
        return BadLog(self.path, iteration, reason)

    @cached_property
    def note(self) -> dict[str, Any]:
        """The file's note about all of its rows. Raises :class:`BadLog`."""
        import pyarrow as pa

        try:
            text = note_of(self.path)
            if text is None:
                raise ValueError("is no file of a delivery log")
            note = json.loads(text)
            if note["format"] != FORMAT:
                raise ValueError(f"has a later format than {FORMAT}")
            return note
        except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
            raise self.bad(self.first, error) from None

    @property
    def config(self) -> LossyConfig:
        """The loss flags of the run."""
        return schema.loss_config(self.note["loss"])

    def boundary(self, stream: str) -> Boundary:
        """The boundary that the messages of ``stream`` cross. Raises :class:`BadLog` for an unknown stream."""
        try:
            place, (layer, layers) = Stream.parse(stream), self.note["layers"][stream]
        except (ValueError, KeyError):
            raise self.bad(self.first, f"stream {stream!r} is not one of the file") from None
        return Boundary(place.stage, layer, layers, place.chunk)

    def crossings(self) -> Iterator[Crossings]:
        """All rows. Raises :class:`BadLog`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetFile(self.path, page_checksum_verification=True) as file:
                if file.schema_arrow.names != columns().names:
                    raise ValueError(f"has other columns: {', '.join(file.schema_arrow.names)}")
                table = file.read()
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.bad(self.first, error) from None
        values = {name: table.column(name) for name in columns().names}
        keys = list(zip(*(values[name].to_pylist() for name in ("iteration", "phase", "stream"))))
        rows: dict[tuple[int, str, str], list[int]] = {}
        for row, key in enumerate(keys):
            rows.setdefault(key, []).append(row)
        numbers = {
            name: values[name].to_numpy() for name in ("message", "packets", "lost", "repaired", "again", "zeros")
        }
        bitmaps = values["bitmap"].to_pylist()
        for key in sorted(rows):
            chosen = rows[key]
            yield Crossings(
                *key,
                **{name: column[chosen] for name, column in numbers.items()},
                bitmaps=[bitmaps[row] for row in chosen],
            )


def boundary_files(folder: Path) -> dict[int, list[BoundaryFile]]:
    """The files of ``folder`` by rank, in the order of iterations."""
    result: dict[int, list[BoundaryFile]] = {}
    for path, rank, first, last in files_beside(folder, PREFIX):
        result.setdefault(rank, []).append(BoundaryFile(path, rank, first, last))
    return result
