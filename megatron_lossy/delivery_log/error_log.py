"""Writes the log of errors: errors in gradients of this process, and what mechanisms do about them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..channel.corruption import Hit, Reduction
from ..config import LossyConfig
from . import schema
from .beside import RowsBeside
from .error_rows import PREFIX, SPARED, ErrorMeta, Reduced, content, errors_schema

if TYPE_CHECKING:
    import pyarrow

Streams = dict[str, dict[int, Reduced]]


class ErrorLog(RowsBeside):
    """Writes the errors and the actions of this process into the folder of ``--delivery-log``."""

    prefix = PREFIX
    columns = staticmethod(errors_schema)

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        super().__init__(config, writer)
        self._loss = schema.loss_identity(config)
        self._streams: Streams = {}

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for one in what:
            if isinstance(one, Reduction):
                ranks = self._streams.setdefault(one.stream.name, {})
                ranks.setdefault(one.rank, Reduced(list(one.sizes), one.width)).add(iteration)
            for row in _rows_of(one) if isinstance(one, Reduction) else one.rows():
                self.add(iteration, **row)

    def restart(self, iteration: int) -> None:
        self._streams = {}
        super().restart(iteration)

    def note(self, table: pyarrow.Table) -> bytes:
        streams, self._streams = self._streams, {}
        return self._note(streams, table)

    def cut(self, note: bytes | None, table: pyarrow.Table, iteration: int) -> bytes:
        meta = ErrorMeta.decode(note)
        streams = {
            name: {rank: reduced.before(iteration) for rank, reduced in ranks.items()}
            for name, ranks in meta.streams.items()
        }
        return self._note(streams, table)

    def _note(self, streams: Streams, table: pyarrow.Table) -> bytes:
        return ErrorMeta(self.rank, __version__, self._loss, streams, content(table)).encode()


def _rows_of(reduction: Reduction) -> list[dict[str, Any]]:
    where = {"stream": reduction.stream.name, "rank": reduction.rank, "kind": SPARED}
    return [*map(_row_of_hit, reduction.hits), *({**where, "bucket": bucket} for bucket in reduction.spared)]


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
