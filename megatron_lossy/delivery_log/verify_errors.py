"""``verify`` of the log of errors: every keyed error is drawn again, and every row must be as it was written.

A file names the flags that it was written with, the gradients that its rows are about, and the iterations of their
reductions. A draw depends on nothing else. Two things cannot be drawn: the size of noise in units of the gradient, and
the errors of a replayed log. For these only the file's digest of its rows is checked.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.exchange import Exchange, Stream
from ..base.registry import MECHANISMS
from ..channel.corruption import Event, make_corruption
from ..config import LossyConfig
from .beside import FileBeside
from .error_rows import ERRORS, SPARED, ErrorMeta, Reduced, content, error_files, event_of, read_errors
from .reader import BadLog
from .schema import loss_config
from .verdict import Verdict, check_files

if TYPE_CHECKING:
    import pyarrow

_ORDER = ("stream", "rank", "bucket")


def verify_errors(folder: Path) -> Verdict:
    """Read all errors and actions of mechanisms in ``folder``; draw errors again; check rows, gaps and missing ranks."""
    verdict = Verdict("records of errors and repairs")
    metas: list[ErrorMeta] = []
    readable = True

    def check(file: FileBeside) -> int:
        nonlocal readable
        try:
            table, meta = read_errors(file.path)
            metas.append(meta)
            _check_file(file, table, meta, metas[:1])
        except ValueError as error:
            readable = False
            raise BadLog(file.path, file.first, error) from None
        return len(table)

    for rank, files in itertools.groupby(error_files(folder), key=lambda file: file.rank):
        verdict.usable[rank] = check_files(rank, list(files), check, "errors", verdict)
    verdict.problems += _missing(metas) if readable else []
    return verdict


def _check_file(file: FileBeside, table: pyarrow.Table, meta: ErrorMeta, reference: Sequence[ErrorMeta]) -> None:
    """Check one file against its name and the first file. ``reference``: the note of the first file."""
    rows = table.to_pylist()
    for number, row in enumerate(rows):
        if not file.first <= row["iteration"] <= file.last:
            raise BadLog(file.path, file.first, f"has records of iteration {row['iteration']}", number)
    if meta.rank != file.rank:
        raise BadLog(file.path, file.first, f"was written by rank {meta.rank}")
    config = loss_config(meta.loss)
    if config != loss_config(reference[0].loss):
        raise BadLog(file.path, file.first, "is of a run with other loss flags than the first file")
    _check_rows(file.path, rows, meta, config)
    if content(table) != meta.content:
        raise BadLog(file.path, file.first, "its rows are not those that were written")


def _check_rows(path: Path, rows: Sequence[Mapping[str, Any]], meta: ErrorMeta, config: LossyConfig) -> None:
    by_iteration: dict[int, list[tuple[int, Mapping[str, Any]]]] = {}
    for number, row in enumerate(rows):
        by_iteration.setdefault(row["iteration"], []).append((number, row))
    reduced = {
        iteration
        for ranks in meta.streams.values()
        for one in ranks.values()
        for first, last in one.iterations
        for iteration in range(first, last + 1)
    }
    drawing = _Drawing(meta, config)
    for iteration in sorted(reduced | by_iteration.keys()):
        numbered = by_iteration.get(iteration, [])
        try:
            drawing.check(iteration, [row for _, row in numbered])
        except (ValueError, TypeError) as error:
            raise BadLog(path, iteration, error, numbered[0][0] if numbered else 0) from None


class _Drawing:
    """Draws the errors that a file recorded. Verbs raise ``ValueError``, or ``TypeError`` if a row lacks something."""

    def __init__(self, meta: ErrorMeta, config: LossyConfig) -> None:
        self._meta = meta
        self._config = config
        self._keyed = config.error_kind != "trace"
        self._corruption = make_corruption(config)

    def check(self, iteration: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Check ``rows``, all rows of ``iteration``."""
        errors: dict[tuple[str, int, int], Mapping[str, Any]] = {}
        for row in rows:
            if row["kind"] in (*ERRORS, SPARED):
                place = tuple(row[name] for name in _ORDER)
                if place in errors:
                    raise ValueError(f"two records of {_where(*place)}")
                errors[place] = row
            elif not any(mechanism.check_row(self._config, row) for mechanism in MECHANISMS.all()):
                raise ValueError(f"{row['kind']!r} is no kind of record")
        for stream, ranks in self._meta.streams.items():
            for rank, one in ranks.items():
                if not any(first <= iteration <= last for first, last in one.iterations):
                    continue
                own = {place[2]: errors.pop(place) for place in list(errors) if place[:2] == (stream, rank)}
                if self._keyed:
                    self._check_drawn(Exchange("grad", Stream.parse(stream), iteration), rank, one, own)
        if errors:
            raise ValueError(f"an error in {_where(*next(iter(errors)))}, which was not reduced")

    def _check_drawn(
        self, exchange: Exchange, rank: int, one: Reduced, recorded: Mapping[int, Mapping[str, Any]]
    ) -> None:
        drawn = {event.bucket: event for event in self._corruption.events(exchange, rank, one.sizes, one.width)}
        for bucket in sorted(drawn.keys() | recorded.keys()):
            where = _where(exchange.stream.name, rank, bucket)
            if bucket not in drawn:
                raise ValueError(f"the recorded seed draws no error in {where}")
            if bucket not in recorded:
                raise ValueError(f"no record of the error in {where} that the recorded seed draws")
            row = recorded[bucket]
            if not (_spared(drawn[bucket], row) or _same(drawn[bucket], event_of(row))):
                raise ValueError(f"the error drawn again from the recorded seed in {where} is not the one recorded")


def _where(stream: str, rank: int, bucket: int) -> str:
    return f"bucket {bucket} of rank {rank} of {stream}"


def _spared(drawn: Event, row: Mapping[str, Any]) -> bool:
    """Whether the drawn error had no effect: only noise in units of a gradient can have none."""
    return row["kind"] == SPARED and drawn.relative


def _same(drawn: Event, recorded: Event) -> bool:
    """Whether both errors are equal, except for the size of noise in units of a gradient."""
    if drawn.relative:
        return 0 < recorded.std < math.inf and (drawn.kind, drawn.seed) == (recorded.kind, recorded.seed)
    return drawn == recorded


def _missing(metas: Sequence[ErrorMeta]) -> list[str]:
    """Ranks without any record, while others of their group have some."""
    known: dict[str, set[int]] = {}
    for meta in metas:
        for stream, ranks in meta.streams.items():
            known.setdefault(stream, set()).update(ranks)
    return [
        f"no errors of rank {rank} of {stream}"
        for stream, ranks in sorted(known.items())
        for rank in sorted(set(range(max(ranks) + 1)) - ranks)
    ]
