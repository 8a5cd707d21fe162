"""``verify``: checks that every record of a log can be read and is as it was written.

A draw depends on nothing but the flags in a file's note and the row, so that drawn losses are drawn again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from ...base.exchange import Exchange, Stream
from ...config import RATES
from ...delivery_log.events import content, event_files, read_events
from ...delivery_log.reader import BadLog, DeliveryLogFolder, LogFile, LogPath, LogRows
from ...delivery_log.replay import Redraws
from ...delivery_log.schema import Meta


@dataclass
class Verdict:
    """The result of ``verify``. ``problems``: one line each, empty if all is well.

    ``rows``: number of rows that were read; ``what``: their name. ``usable``: by rank, the inclusive range of
    iterations before the first problem or gap; ``None`` if there is no such range.
    """

    what: str = "records"
    problems: list[str] = field(default_factory=list)
    rows: int = 0
    usable: dict[int, tuple[int, int] | None] = field(default_factory=dict)

    def text(self, folder: Path) -> str:
        """Return the result in lines for people."""
        ranges = [part for part in self.usable.values() if part is not None]
        first, last = max((part[0] for part in ranges), default=0), min((part[1] for part in ranges), default=-1)
        rest = "no iteration is usable for all ranks"
        if len(ranges) == len(self.usable) and first <= last:
            rest = f"iterations {first} to {last} are usable for all ranks"
        return "\n".join([*self.problems, f"{folder}: {self.rows:,} good {self.what}; {rest}"])


def _check_files(
    rank: int, files: Sequence[Any], check: Callable[[Any], int], verdict: Verdict
) -> tuple[int, int] | None:
    """Check the files of a rank one after another and note the first problem. Return the usable range before it."""
    good = None
    for number, file in enumerate(files):
        previous = files[number - 1] if number else None
        if previous is not None and file.first > previous.last + 1:
            gap = f"iterations {previous.last + 1} to {file.first - 1}"
            verdict.problems.append(f"rank {rank}: no {verdict.what} of {gap}")
            break
        try:
            verdict.rows += check(file)
        except BadLog as error:
            verdict.problems.append(str(error))
            if error.iteration > files[0].first:
                good = files[0].first, error.iteration - 1
            break
        good = files[0].first, file.last
    return good


def _check_source(file: LogFile | LogPath, meta: Meta, first: Meta) -> None:
    """Raise :class:`BadLog` unless ``file``, with the note ``meta``, is of the rank in its name and of the run of ``first``."""
    try:
        same = meta.config == first.config
    except (ValueError, TypeError) as error:
        raise BadLog(file.path, file.first, error) from None
    if not same:
        raise BadLog(file.path, file.first, "is of a run with other loss flags than the first file")
    if meta.rank != file.rank:
        raise BadLog(file.path, file.first, f"was written by rank {meta.rank}")


def verify(folder: DeliveryLogFolder) -> Verdict:
    """Read all deliveries; check rows, bitmaps, digests, gaps, missing ranks, and that ranks agree."""
    verdict, redrawn, first = Verdict(), Redraws(), _first_note(folder)

    def check(file: LogFile) -> int:
        _check_source(file, file.meta, file.meta if first is None else first)
        count = 0
        for group in range(len(file.groups)):
            rows = file.read(group)
            for key, part in rows.exchanges.items():
                _check_exchange(file, rows[part], key, folder, redrawn)
            count += len(rows)
        return count

    for rank, files in folder.ranks.items():
        verdict.usable[rank] = _check_files(rank, files, check, verdict)
    with contextlib.suppress(BadLog):  # reported already
        streams = sorted({name for name, _ in folder.writers})
        missing = {(name, rank) for name in streams for rank in range(folder.size(name))} - folder.writers.keys()
        verdict.problems += [f"no records of rank {rank} of {name}" for name, rank in sorted(missing)]
    return verdict


def _check_exchange(
    file: LogFile, rows: LogRows, key: tuple[int, str, str], folder: DeliveryLogFolder, redrawn: Redraws
) -> None:
    iteration, phase, stream = key

    def bad(reason: object) -> BadLog:
        return BadLog(file.path, iteration, reason, rows.first)

    if not file.first <= iteration <= file.last:
        raise BadLog(file.path, file.first, f"has records of iteration {iteration}", rows.first)
    if phase not in RATES or stream not in file.meta.streams:
        raise bad(f"phase {phase!r}, stream {stream!r} are not those of the file")
    links = file.links(rows)
    try:
        redrawn.fill(links, np.arange(len(links.sources)), Exchange(phase, Stream.parse(stream), iteration), file)
    except ValueError as error:
        raise bad(error) from None
    if (first := folder.writers[stream, int(links.destinations[0])][0]) != file.rank:
        other = folder.file(first, iteration)
        theirs = other.exchange(iteration, phase, stream) if other is not None else None
        if theirs is None:
            return
        names = ("bucket", "source", "destination", "lost")
        same = all(np.array_equal(getattr(rows, name), getattr(theirs, name)) for name in names)
        if not (same and rows.bitmap.equals(theirs.bitmap) and rows.digest.equals(theirs.digest)):
            raise bad(f"ranks {first} and {file.rank} recorded different losses")


def _first_note(folder: DeliveryLogFolder) -> Meta | None:
    """Return the note of the first file of ``folder``; ``None`` if it is bad, which the check of that file reports."""
    try:
        return folder.files[0].meta
    except BadLog:
        return None


def verify_events(folder: Path, deliveries: DeliveryLogFolder | None = None) -> Verdict:
    """Read all events of ``folder``; check their digests, gaps, missing ranks, and that they are of one run.

    ``deliveries``: those of the same folder, if it has some.
    """
    verdict = Verdict("records of events")
    first = None if deliveries is None else _first_note(deliveries)

    def check(file: LogPath) -> int:
        nonlocal first
        table, meta = read_events(file)
        first = first or meta
        _check_source(file, meta, first)
        for number, iteration in enumerate(table["iteration"].to_pylist()):
            if not file.first <= iteration <= file.last:
                raise BadLog(file.path, file.first, f"has records of iteration {iteration}", number)
        if content([table]) != meta.content:
            raise BadLog(file.path, file.first, "its rows are not those that were written")
        return len(table)

    for rank, files in groupby(event_files(folder), key=lambda file: file.rank):
        verdict.usable[rank] = _check_files(rank, list(files), check, verdict)
    missing = sorted(set(range(max(verdict.usable, default=0))) - verdict.usable.keys())
    verdict.problems += [f"no {verdict.what} of rank {rank}" for rank in missing]
    return verdict
