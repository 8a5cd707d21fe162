"""The delivery log (``--delivery-log``): every decision of the channels on record, in Parquet.

Each rank writes the units that arrived at it. Files are closed after ``--delivery-log-chunk`` iterations, before a
checkpoint, or when they have grown large. The format is in :mod:`megatron_lossy.delivery_log.schema`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from .error_rows import error_files

if TYPE_CHECKING:
    import pyarrow

_FLAG = "--delivery-log"
# A row group, which a reader decodes at once, takes at least this much memory, in whole iterations.
_GROUP_BYTES = 2**20
# A file is closed when its rows take about this much memory.
_FILE_BYTES = 2**26
_ROW_BYTES = 48  # memory of a row without its bitmap


def claim_delivery_log(
    config: LossyConfig, ranks: int, resumes: bool, run: dict[str, Any], flags: type | None = None
) -> None:
    """Check that ``--delivery-log`` can take the records of this run, and note the run in its folder.

    Call it before any process group exists; all ranks may. ``ranks``: size of the data-parallel group (times context
    parallel). ``resumes``: whether the run continues from a checkpoint. ``run``: other settings that identify the run,
    for JSON. ``flags``: the dataclass that these settings are the identity of, if it is one. Raises :class:`UsageError`
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
        if error_files(folder) or any(schema.parse_name(path) for path in folder.iterdir()):
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
        return difference(flags, there["run"], here["run"])
    for name, value in here["run"].items() if found is None else ():
        if there["run"].get(name, value) != value:  # an earlier version may not have noted it
            return f"--{name.replace('_', '-')} was {there['run'][name]} there and is {value} here"
    return found


@dataclass(frozen=True)
class _Entry:
    """One exchange: L links with a row for each of B (parts of) buckets.

    ``bitmaps`` uint8[L, bytes] has the bitmaps of a link one after another, and ``widths`` [B] their bytes. If
    ``bitmaps`` is ``None``, ``digests`` has a digest for each link.
    """

    iteration: int
    phase: str
    stream: str
    buckets: np.ndarray
    units: np.ndarray
    sources: np.ndarray
    destinations: np.ndarray
    lost: np.ndarray  # [L, B]
    bitmaps: np.ndarray | None
    widths: np.ndarray
    digests: list[bytes] | None

    @property
    def size(self) -> int:
        """Bytes that the rows take in memory, about."""
        return self.lost.size * _ROW_BYTES + (self.bitmaps.nbytes if self.bitmaps is not None else 0)


class DeliveryLog(Observer):
    """Writes the log of this process's rank; in a virtual cluster the log of all receivers.

    ``writer``: the rank in the names of files, if several writers share a process; default that of the process.
    """

    def __init__(self, config: LossyConfig, writer: int | None = None) -> None:
        self._writer = writer
        schema.check_pyarrow(_FLAG, config.delivery_log)
        self._config = config
        self._folder = Path(config.delivery_log)
        self._entries: list[_Entry] = []
        self._size = 0
        self._streams: dict[str, dict[str, schema.PhaseCut]] = {}
        self._first = 0  # iterations from here on are not on disk yet
        self._end = 0  # the iteration after the last one that is over
        self._checked = False

    @property
    def _rank(self) -> int:
        if self._writer is not None:
            return self._writer
        return dist.get_rank() if dist.is_initialized() else 0

    # --- events of a run --------------------------------------------------------------------------------------------

    def observe(self, delivery: Delivery) -> None:
        if not self._checked:
            self._check_free()
        exchange = delivery.exchange
        phases = self._streams.setdefault(exchange.stream.name, {})
        if exchange.phase not in phases:
            phases[exchange.phase] = schema.PhaseCut(
                tuple(map(int, delivery.sources)),
                tuple(map(int, delivery.receivers)),
                delivery.arrived.shape[2],
                tuple((cut.first, cut.count, cut.shard, cut.elements) for cut in delivery.cut),
            )
        entry = self._entry(delivery)
        if entry.lost.size:  # nothing crosses the network in a group of one rank
            self._entries.append(entry)
            self._size += entry.size

    def finish_iteration(self, iteration: int, successful: bool, look: Look) -> None:
        self._end = iteration + 1
        if self._end - self._first >= self._config.delivery_log_chunk or self._size >= _FILE_BYTES:
            self.save()

    def restart(self, iteration: int) -> None:
        self._entries, self._size = [], 0
        self._first = self._end = iteration
        self._checked = True
        for unfinished in self._folder.glob(f".rank_{self._rank:05d}_*.tmp"):  # left by a killed run
            unfinished.unlink(missing_ok=True)
        for path, first, last in self._own_files():
            if last >= iteration:
                self._cut(path, first, iteration)

    def save(self) -> None:
        """Close the file of all iterations that are over."""
        if self._end == self._first:
            return
        over = [entry for entry in self._entries if entry.iteration < self._end]
        self._write(schema.file_name(self._rank, self._first, self._end - 1), over)
        self._entries = [entry for entry in self._entries if entry.iteration >= self._end]
        self._size = sum(entry.size for entry in self._entries)
        self._first = self._end

    def close(self) -> None:
        self.save()

    # --- rows ------------------------------------------------------------------------------------------------------

    def _entry(self, delivery: Delivery) -> _Entry:
        exchange, arrived = delivery.exchange, delivery.arrived
        sources, receivers = np.array(delivery.sources), np.array(delivery.receivers)
        crosses = delivery.crossing
        if exchange.phase == "grad" and self._config.lossy_self:
            crosses = np.ones_like(crosses)
        links = np.nonzero(crosses)
        arrived = arrived[links]
        all_units = slice(0, arrived.shape[1])
        by_bucket = self._config.loss_unit != "shard"
        redrawn = self._redrawn(exchange.phase)
        if by_bucket and not redrawn:
            parts = [(number, cut.numbers) for number, cut in enumerate(delivery.cut)]
        else:
            parts = [(schema.ALL_BUCKETS, all_units)]
        units = np.array([numbers.stop - numbers.start for _, numbers in parts], dtype=np.int32)
        lost = np.stack([(~arrived[:, numbers]).sum(axis=1, dtype=np.int32) for _, numbers in parts], axis=1)
        packed = np.concatenate([schema.pack(arrived[:, numbers]) for _, numbers in parts], axis=1)
        destinations = receivers[links[0]].astype(np.int32)
        return _Entry(
            exchange.step,
            exchange.phase,
            exchange.stream.name,
            np.array([bucket for bucket, _ in parts], dtype=np.int32),
            units,
            sources[links[1]].astype(np.int32),
            destinations,
            lost,
            None if redrawn else packed,
            -(-units // 8),
            schema.digests(destinations, packed) if redrawn else None,
        )

    def _redrawn(self, phase: str) -> bool:
        """Whether rows carry a digest in place of the bitmap, because the losses can be drawn again."""
        config = self._config
        return (
            config.loss_unit == "packet"
            and config.transport != "udp"
            and not config.delivery_log_bitmaps
            and CHANNELS.load(config.phase(phase).model).redrawable
        )

    # --- files -----------------------------------------------------------------------------------------------------

    def _own_files(self) -> list[tuple[Path, int, int]]:
        if not self._folder.is_dir():
            return []
        found = [(path, schema.parse_name(path)) for path in sorted(self._folder.iterdir())]
        return [(path, name[1], name[2]) for path, name in found if name and name[0] == self._rank]

    def _check_free(self) -> None:
        """Refuse a folder with records of another run, if nobody claimed the folder."""
        self._checked = True
        if any(last >= self._first for _, _, last in self._own_files()):
            raise refuse(_FLAG, self._folder, "holds the log of a run; choose another folder")

    def _cut(self, path: Path, first: int, iteration: int) -> None:
        """Keep only the rows before ``iteration`` in the file at ``path``."""
        import pyarrow.compute as pc
        import pyarrow.parquet as pq

        if first < iteration:
            try:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    meta = schema.Meta.decode(file.metadata.metadata)
                    table = file.read()
            except (OSError, ValueError) as error:  # Arrow's own errors are among them
                raise refuse(_FLAG, path, f"cannot be continued: {' '.join(str(error).split())}") from None
            if difference(LossyConfig, meta.loss, schema.loss_identity(self._config)):
                raise refuse(_FLAG, path, "is of a run with other loss flags; choose another folder")
            kept = table.filter(pc.field("iteration") < iteration).cast(schema.arrow_schema())
            self._write_parts(schema.file_name(self._rank, first, iteration - 1), [kept] if len(kept) else [], meta)
        path.unlink()

    def _write(self, name: str, entries: list[_Entry]) -> None:
        meta = schema.Meta(self._rank, __version__, schema.loss_identity(self._config), self._streams)
        self._write_parts(name, map(_table, _groups(entries)), meta)

    def _write_parts(self, name: str, tables: Iterable[pyarrow.Table], meta: schema.Meta) -> None:
        """Write a file aside, a row group per table, and give it its name once it is whole."""
        import pyarrow.parquet as pq

        self._folder.mkdir(parents=True, exist_ok=True)

        def write(aside: Path) -> None:
            # Arrow's own schema would take a kilobyte of every file, and these columns do not need it.
            with pq.ParquetWriter(
                aside,
                schema.arrow_schema(),
                compression="zstd",
                write_statistics=["iteration"],
                write_page_checksum=True,
                store_schema=False,
            ) as writer:
                for table in tables:
                    writer.write_table(table, row_group_size=2**31)
                writer.add_key_value_metadata(meta.encode())

        replace_file(self._folder / name, write)


def _groups(entries: list[_Entry]) -> Iterator[list[_Entry]]:
    """Consecutive entries for one row group each; an iteration is never divided."""
    group: list[_Entry] = []
    size = 0
    for entry in entries:
        if size >= _GROUP_BYTES and entry.iteration != group[-1].iteration:
            yield group
            group, size = [], 0
        group.append(entry)
        size += entry.size
    if group:
        yield group


def _table(entries: list[_Entry]) -> pyarrow.Table:
    import pyarrow as pa

    def rows(value_of: Any) -> np.ndarray:
        return np.concatenate([value_of(entry).reshape(-1) for entry in entries])

    def text(value_of: Any) -> pyarrow.Array:
        words = sorted({value_of(entry) for entry in entries})
        codes = rows(lambda e: np.full(e.lost.size, words.index(value_of(e)), dtype=np.int8))
        return pa.DictionaryArray.from_arrays(codes, words).cast(pa.string())

    def per_link(values: np.ndarray, entry: _Entry) -> np.ndarray:
        return np.repeat(values, entry.lost.shape[1])

    def per_bucket(values: np.ndarray, entry: _Entry) -> np.ndarray:
        return np.tile(values, entry.lost.shape[0])

    columns = [
        rows(lambda e: np.full(e.lost.size, e.iteration, dtype=np.int64)),
        text(lambda e: e.phase),
        text(lambda e: e.stream),
        rows(lambda e: per_bucket(e.buckets, e)),
        rows(lambda e: per_link(e.sources, e)),
        rows(lambda e: per_link(e.destinations, e)),
        rows(lambda e: per_bucket(e.units, e)),
        rows(lambda e: e.lost),
        pa.concat_arrays([_bitmaps(entry) for entry in entries]),
        pa.array([digest for entry in entries for digest in entry.digests or [None] * entry.lost.size], pa.binary()),
    ]
    return pa.table(columns, schema=schema.arrow_schema())


def _bitmaps(entry: _Entry) -> pyarrow.Array:
    import pyarrow as pa

    if entry.bitmaps is None:
        return pa.nulls(entry.lost.size, pa.binary())
    offsets = np.zeros(entry.lost.size + 1, dtype=np.int32)
    np.cumsum(np.tile(entry.widths, entry.lost.shape[0]), out=offsets[1:])
    data = np.ascontiguousarray(entry.bitmaps)
    return pa.BinaryArray.from_buffers(pa.binary(), entry.lost.size, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
