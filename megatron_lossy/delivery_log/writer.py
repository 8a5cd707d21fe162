"""The delivery log (``--delivery-log``): every decision of the channels on record, in Parquet.

Each rank writes the units that arrived at it. The format is in :mod:`megatron_lossy.delivery_log.schema`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch.distributed as dist

from .. import __version__
from ..base.errors import cannot, refuse
from ..base.exchange import Delivery
from ..base.files import check_folder, replace_file, write_text
from ..base.flags import difference, identity
from ..base.registry import CHANNELS
from ..config import LossyConfig
from ..run.monitor.observer import Look, Observer
from . import schema
from .reader import LogPath, log_files, read_file

if TYPE_CHECKING:
    import pyarrow

_FLAG = "--delivery-log"
# A row group, which a reader decodes at once, takes at least this much memory, in whole iterations.
_GROUP_BYTES = 3 * 2**19
# A file is closed when its rows take about this much memory.
_FILE_BYTES = 2**26


def claim_delivery_log(
    config: LossyConfig, ranks: int, resumes: bool, run: dict[str, Any], flags: type | None = None
) -> None:
    """Check that ``--delivery-log`` can take the records of this run, and note the run in its folder.

    Call it before any process group exists; all ranks may. ``ranks``: size of the data-parallel group (times context
    parallel). ``resumes``: whether the run continues from a checkpoint. ``run``: other settings that identify the run,
    for JSON. ``flags``: the dataclass that these settings are the identity of, if it is one. Raise :class:`UsageError`
    if the folder holds another run, or this one and it starts anew.
    """
    if config.delivery_log is None or config.inert or config.jobs().apart:
        return
    schema.check_pyarrow(_FLAG, config.delivery_log)
    folder = Path(config.delivery_log)
    here = json.loads(json.dumps({"ranks": ranks, "loss": identity(config), "run": run}))
    note = folder / schema.RUN
    check_folder(_FLAG, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if log_files(folder) or log_files(folder, schema.EVENTS):
            try:
                other = _other_run(json.loads(note.read_text()), here, flags)
            except (FileNotFoundError, ValueError, KeyError):
                other = "it does not say which"
            if other:
                raise refuse(_FLAG, folder, f"holds another run ({other}); choose another folder")
            if not resumes:
                raise refuse(_FLAG, folder, "holds the log of a run with these settings; resume it, or choose another")
            return
        write_text(note, json.dumps({**here, "version": __version__}, indent=1) + "\n")
    except OSError as error:
        raise cannot(_FLAG, folder, "written", error) from None


def _other_run(there: dict[str, Any], here: dict[str, Any], flags: type | None) -> str | None:
    if there["ranks"] != here["ranks"]:
        return f"of {there['ranks']} data-parallel ranks, here {here['ranks']}"
    found = difference(LossyConfig, there["loss"], here["loss"])
    if found is None and flags is not None:
        # A finished run may go on with more. The folder of its checkpoints says when.
        return difference(flags, there["run"], {**here["run"], "train_iters": there["run"]["train_iters"]})
    for name, value in here["run"].items() if found is None else ():
        if there["run"].get(name, value) != value:  # an earlier version may not have noted it
            return f"--{name.replace('_', '-')} was {there['run'][name]} there and is {value} here"
    return found


class LogWriter(Observer, ABC):
    """Writes files of one kind. ``writer``: the rank in their names, if several writers share a process; default its own.

    A file is closed after :attr:`iterations`, before a checkpoint, or when it has grown large.
    """

    iterations = 1000

    #: The beginning of the names of the files, and the size at which one is closed.
    prefix: ClassVar[str]
    most: ClassVar[int]

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        schema.check_pyarrow(_FLAG, config.delivery_log)
        self._config = config
        self._writer = writer
        self._folder = Path(config.delivery_log or "")
        self._first = 0  # iterations from here on are not on disk yet
        self._end = 0  # the iteration after the last one that has ended
        self._checked = False
        self._size = 0
        self._rows: list[tuple[int, int, Any]] = []  # iteration, size, and what is recorded

    @staticmethod
    @abstractmethod
    def columns() -> pyarrow.Schema:
        """Return the columns, in order; ``iteration`` is the first."""

    @abstractmethod
    def tables(self, rows: list[tuple[int, int, Any]]) -> Iterable[pyarrow.Table]:
        """Return ``rows``, as they were added, in a table for each row group."""

    @abstractmethod
    def note(self, tables: Iterable[pyarrow.Table], last: schema.Meta | None) -> schema.Meta:
        """Return the note of a file about its rows, ``tables``. ``last``: the note of the file that they were cut from."""

    def add(self, iteration: int, size: int, row: Any) -> None:
        """Record ``row`` of an iteration that is not over."""
        self._rows.append((iteration, size, row))
        self._size += size

    @property
    def rank(self) -> int:
        """The rank in the names of the files."""
        if self._writer is not None:
            return self._writer
        return dist.get_rank() if dist.is_initialized() else 0

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        if not self._checked and self._own_files():  # of another run: the folder has not been claimed
            raise refuse(_FLAG, self._folder, "holds the log of a run; choose another folder")
        self._checked = True
        self._end = iteration + 1
        if self._end - self._first >= self.iterations or self._size >= self.most:
            self.save()

    def restart(self, iteration: int) -> None:
        self._rows, self._size = [], 0
        self._first = self._end = iteration
        self._checked = True
        for unfinished in self._folder.glob(f".{self.prefix}_{self.rank:05d}_*.tmp"):  # left by a killed run
            unfinished.unlink(missing_ok=True)
        for file in self._own_files():
            if file.last >= iteration:
                if file.first < iteration:
                    self._cut(file, iteration)
                file.path.unlink()

    def save(self) -> None:
        """Close the file of all ended iterations."""
        if self._end > self._first:
            over = [row for row in self._rows if row[0] < self._end]
            self._write(self._first, self._end - 1, self.tables(over))
            # Rows of the next iteration may be here: an iteration's last gather may end after messages of the next one.
            self._rows = [row for row in self._rows if row[0] >= self._end]
            self._size = sum(size for _, size, _ in self._rows)
            self._first = self._end

    def close(self) -> None:
        self.save()

    def _own_files(self) -> list[LogPath]:
        return [file for file in log_files(self._folder, self.prefix) if file.rank == self.rank]

    def _cut(self, file: LogPath, iteration: int) -> None:
        """Write the rows of ``file`` before ``iteration`` into a file of their own."""
        import pyarrow.compute as pc

        try:
            table, meta = read_file(file.path, self.columns())
        except (OSError, ValueError, KeyError, TypeError) as error:  # Arrow's own errors are among them
            raise refuse(_FLAG, file.path, f"cannot be continued: {' '.join(str(error).split())}") from None
        if difference(LossyConfig, meta.loss, schema.loss_identity(self._config)):
            raise refuse(_FLAG, file.path, "is of a run with other loss flags; choose another folder")
        kept = table.filter(pc.field("iteration") < iteration)
        self._write(file.first, iteration - 1, [kept] if len(kept) else [], meta)

    def _write(self, first: int, last: int, tables: Iterable[pyarrow.Table], meta: schema.Meta | None = None) -> None:
        """Write a file aside, a row group per table, and give it its name once it is whole."""
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)
        note = self.note(tables, meta).encode()

        def write(aside: Path) -> None:
            # Arrow's own schema would take a kilobyte of every file, and these columns do not need it.
            with pq.ParquetWriter(
                aside,
                self.columns(),
                compression="zstd",
                write_statistics=["iteration"],
                write_page_checksum=True,
                store_schema=False,
            ) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=2**31)
                writer.add_key_value_metadata(note)

        replace_file(self._folder / schema.file_name(self.rank, first, last, self.prefix), write)


class DeliveryLog(LogWriter):
    """Writes the log of this process's rank; in a virtual cluster the log of all receivers."""

    prefix = schema.PREFIX
    columns = staticmethod(schema.arrow_schema)
    most = _FILE_BYTES

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        super().__init__(config, writer)
        self._streams: dict[str, dict[str, schema.PhaseCut]] = {}

    # --- events of a run --------------------------------------------------------------------------------------------

    def observe(self, delivery: Delivery) -> None:
        exchange = delivery.exchange
        phases = self._streams.setdefault(exchange.stream.name, {})
        if exchange.phase not in phases:
            phases[exchange.phase] = schema.PhaseCut(
                tuple(map(int, delivery.sources)),
                tuple(map(int, delivery.receivers)),
                delivery.arrived.shape[2],
                tuple((cut.first, cut.count, cut.shard, cut.elements) for cut in delivery.cut),
            )
        table = self._table(delivery)
        if len(table):  # nothing crosses the network in a group of one rank
            self.add(exchange.step, table.nbytes, table)

    # --- rows ------------------------------------------------------------------------------------------------------

    def _table(self, delivery: Delivery) -> pyarrow.Table:
        """Return the rows of an exchange: for each of L links a row for each of B (parts of) buckets."""
        import pyarrow as pa

        exchange, arrived = delivery.exchange, delivery.arrived
        sources, receivers = np.array(delivery.sources), np.array(delivery.receivers)
        crosses = delivery.crossing
        if exchange.phase == "grad" and self._config.lossy_self:
            crosses = np.ones_like(crosses)
        links = np.nonzero(crosses)
        arrived = arrived[links]
        # Rows of losses that can be drawn again carry a digest in place of the bitmap.
        redrawn = self._config.loss_unit == "packet" and not self._config.observed
        redrawn = redrawn and CHANNELS.load(self._config.phase(exchange.phase).model).redrawable
        if self._config.loss_unit != "shard" and not redrawn:
            parts = [(number, cut.numbers) for number, cut in enumerate(delivery.cut)]
        else:
            parts = [(schema.ALL_BUCKETS, slice(0, arrived.shape[1]))]
        units = np.array([numbers.stop - numbers.start for _, numbers in parts], dtype=np.int32)
        lost = np.stack([(~arrived[:, numbers]).sum(axis=1, dtype=np.int32) for _, numbers in parts], axis=1)
        packed = np.concatenate([schema.pack(arrived[:, numbers]) for _, numbers in parts], axis=1)
        senders, destinations = sources[links[1]].astype(np.int32), receivers[links[0]].astype(np.int32)
        count, each = lost.shape
        nulls = pa.nulls(lost.size, pa.binary())
        columns = [
            np.full(lost.size, exchange.step, dtype=np.int64),
            pa.repeat(exchange.phase, lost.size),
            pa.repeat(exchange.stream.name, lost.size),
            np.tile(np.array([bucket for bucket, _ in parts], dtype=np.int32), count),
            np.repeat(senders, each),
            np.repeat(destinations, each),
            np.tile(units, count),
            lost.reshape(-1),
            nulls if redrawn else _bitmaps(packed, np.tile(-(-units // 8), count)),
            pa.array(schema.digests(destinations, packed), pa.binary()) if redrawn else nulls,
        ]
        return pa.table(columns, schema=self.columns())

    # --- files -----------------------------------------------------------------------------------------------------

    def note(self, tables: Iterable[pyarrow.Table], last: schema.Meta | None) -> schema.Meta:
        return last or schema.Meta(self.rank, __version__, schema.loss_identity(self._config), self._streams)

    def tables(self, rows: list[tuple[int, int, Any]]) -> Iterator[pyarrow.Table]:
        """Yield the rows of consecutive exchanges for one row group each; an iteration is never divided."""
        import pyarrow as pa

        group: list[pyarrow.Table] = []
        size = before = 0
        for iteration, bytes_, table in rows:
            if size >= _GROUP_BYTES and iteration != before:
                yield pa.concat_tables(group)
                group, size = [], 0
            group.append(table)
            size, before = size + bytes_, iteration
        if group:
            yield pa.concat_tables(group)


def _bitmaps(packed: np.ndarray, widths: np.ndarray) -> pyarrow.Array:
    """Return ``packed`` uint8[L, bytes], the bitmaps of each link one after another, in rows of ``widths`` bytes."""
    import pyarrow as pa

    offsets = np.append(0, np.cumsum(widths)).astype(np.int32)
    data = np.ascontiguousarray(packed)
    return pa.BinaryArray.from_buffers(pa.binary(), len(widths), [None, pa.py_buffer(offsets), pa.py_buffer(data)])
