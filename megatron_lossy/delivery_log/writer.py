"""The delivery log (``--delivery-log``): every decision of the channels on record, in Parquet.

Each rank writes the units that arrived at it. The format is in :mod:`megatron_lossy.delivery_log.schema`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import __version__
from ..base.errors import cannot, refuse
from ..base.exchange import Delivery
from ..base.files import check_folder, write_text
from ..base.flags import difference, identity
from ..base.registry import CHANNELS
from ..config import LossyConfig
from . import schema
from .events import event_files
from .files import LogWriter, log_files

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
        if event_files(_FLAG, folder) or log_files(folder):
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
        redrawn = self._redrawn(exchange.phase)
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

    def _redrawn(self, phase: str) -> bool:
        """Whether rows carry a digest in place of the bitmap, because the losses can be drawn again."""
        config = self._config
        return (
            config.loss_unit == "packet"
            and not config.observed
            and not config.delivery_log_bitmaps
            and CHANNELS.load(config.phase(phase).model).redrawable
        )

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
