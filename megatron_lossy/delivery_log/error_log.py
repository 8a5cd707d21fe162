"""Writing the log of errors: what happened to gradients in this process, and what it did about replicas that differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from .. import __version__
from ..channel.corruption import Hit, Reduction
from ..config import LossyConfig
from ..errors import refuse
from ..files import replace_file
from ..monitor.observer import Look, Observer
from . import schema
from .errors import SPARED, ErrorMeta, Reduced, content, error_files, errors_schema, file_name, read_errors

if TYPE_CHECKING:
    import pyarrow


class ErrorLog(Observer):
    """Writes the errors of this process, and what it did, into the folder of ``--delivery-log``."""

    def __init__(self, config: LossyConfig) -> None:
        schema.check_pyarrow("--delivery-log", config.delivery_log)
        self._loss = schema.loss_identity(config)
        self._chunk = config.delivery_log_chunk
        self._folder = Path(config.delivery_log or "")
        self._rows: list[dict[str, Any]] = []
        self._streams: dict[str, dict[int, Reduced]] = {}
        self._first = self._end = 0
        self._checked = False

    @property
    def _rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def happened(self, iteration: int, what: Sequence[Any]) -> None:
        for one in what:
            if isinstance(one, Reduction):
                ranks = self._streams.setdefault(one.stream.name, {})
                ranks.setdefault(one.rank, Reduced(list(one.sizes), one.width)).add(iteration)
            rows = _rows_of(one) if isinstance(one, Reduction) else one.rows()
            self._rows += [{"iteration": iteration, **row} for row in rows]

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        if not self._checked:
            self._check_free()
        self._end = iteration + 1
        if self._end - self._first >= self._chunk:
            self.save()

    def restart(self, iteration: int) -> None:
        self._rows, self._streams, self._first, self._end = [], {}, iteration, iteration
        self._checked = True
        for unfinished in self._folder.glob(f".errors_{self._rank:05d}_*.tmp"):  # of a killed run
            unfinished.unlink(missing_ok=True)
        for path, first, last in self._own_files():
            if last >= iteration:
                self._cut(path, first, iteration)

    def save(self) -> None:
        if self._end == self._first:
            return
        import pyarrow as pa

        table = pa.Table.from_pylist(self._rows, schema=errors_schema())
        self._write(self._first, self._end - 1, table, self._streams)
        self._rows, self._streams, self._first = [], {}, self._end

    def close(self) -> None:
        self.save()

    # --- files -----------------------------------------------------------------------------------------------------

    def _own_files(self) -> list[tuple[Path, int, int]]:
        return [(path, first, last) for path, rank, first, last in error_files(self._folder) if rank == self._rank]

    def _check_free(self) -> None:
        """Where nobody claimed the folder: do not mix this run's records with those of another."""
        self._checked = True
        if any(last >= self._first for _, _, last in self._own_files()):
            raise refuse("--delivery-log", self._folder, "holds the log of a run; choose another folder")

    def _cut(self, path: Path, first: int, iteration: int) -> None:
        """Keep of the file at ``path`` what was before ``iteration``."""
        import pyarrow.compute as pc

        if first < iteration:
            try:
                table, meta = read_errors(path)
            except ValueError as error:
                raise refuse("--delivery-log", path, f"cannot be continued: {error}") from None
            streams = {
                name: {rank: reduced.before(iteration) for rank, reduced in ranks.items()}
                for name, ranks in (meta.streams if meta is not None else {}).items()
            }
            kept = table.filter(pc.field("iteration") < iteration)
            self._write(first, iteration - 1, kept, streams if meta is not None else None)
        path.unlink()

    def _write(
        self, first: int, last: int, table: pyarrow.Table, streams: dict[str, dict[int, Reduced]] | None
    ) -> None:
        """``streams``: ``None`` if they are not known, of a file written by an earlier version."""
        import pyarrow.parquet as pq

        meta = {} if streams is None else _meta(self._rank, self._loss, streams, table)

        def write(aside: Path) -> None:
            options = {"compression": "zstd", "write_page_checksum": True, "store_schema": False}
            with pq.ParquetWriter(aside, errors_schema(), **options) as writer:
                writer.write_table(table.cast(errors_schema()))
                writer.add_key_value_metadata(meta)

        self._folder.mkdir(parents=True, exist_ok=True)
        replace_file(self._folder / file_name(self._rank, first, last), write)


def _meta(
    rank: int, loss: Mapping[str, Any], streams: dict[str, dict[int, Reduced]], table: pyarrow.Table
) -> dict[bytes, bytes]:
    return ErrorMeta(rank, __version__, loss, streams, content(table)).encode()


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
