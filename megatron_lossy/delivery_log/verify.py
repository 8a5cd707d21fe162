"""``verify``: checks that every record of a delivery log can be read and is as it was written."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import RATES, LossyConfig
from ..exchange import Exchange, Stream
from ..mechanisms.boundaries.flags import BOUNDARY_PHASES
from ..mechanisms.boundaries.log import BoundaryFile, boundary_files, check_crossings
from .reader import BadLog, DeliveryLogFolder, LogFile, LogRows
from .replay import Redrawn
from .verdict import Verdict, check_files


def verify(folder: DeliveryLogFolder) -> Verdict:
    """Read everything; check rows, bitmaps, digests, gaps, missing ranks, and that ranks agree."""
    verdict = Verdict()
    redrawn = Redrawn()
    for rank, files in folder.ranks.items():
        verdict.usable[rank] = check_files(
            rank, files, lambda file: _check_file(file, folder, redrawn), "records", verdict
        )
    verdict.problems += _missing_ranks(folder)
    seen: set[tuple[str, str]] = set()
    for rank, boundaries in boundary_files(folder.path).items():
        good = check_files(
            rank, boundaries, lambda file: _check_boundaries(file, folder, seen), "records of boundaries", verdict
        )
        verdict.usable[rank] = _both(verdict.usable.get(rank), good)
    verdict.problems += _missing_phases(folder, seen)
    return verdict


def _both(one: tuple[int, int] | None, other: tuple[int, int] | None) -> tuple[int, int] | None:
    if one is None or other is None:
        return None
    first, last = max(one[0], other[0]), min(one[1], other[1])
    return (first, last) if first <= last else None


def _check_boundaries(file: BoundaryFile, folder: DeliveryLogFolder, seen: set[tuple[str, str]]) -> int:
    _check_source(file, file.config, file.note["rank"], folder)
    count = 0
    for these in file.crossings():
        check_crossings(file, these)
        seen.add((these.phase, these.stream))
        count += len(these.message)
    return count


def _missing_phases(folder: DeliveryLogFolder, seen: set[tuple[str, str]]) -> list[str]:
    """Boundaries with records of only one of two lossy directions: each direction has a rank of its own."""
    reference = next(iter(folder.ranks.values()))[0]
    if not seen or _config_of(reference) is None:
        return []
    config = reference.meta.config
    lossy = [phase for phase in BOUNDARY_PHASES if config.act_transport == "udp" or config.boundary_rate(phase)]
    return [
        f"no records of {phase} of {stream}"
        for stream in sorted({stream for _, stream in seen})
        for phase in lossy
        if (phase, stream) not in seen
    ]


def _check_file(file: LogFile, folder: DeliveryLogFolder, redrawn: Redrawn) -> int:
    _check_source(file, file.meta.config, file.meta.rank, folder)
    count = 0
    for group in range(len(file.groups)):
        rows = file.read(group)
        for key, part in rows.exchanges.items():
            _check_exchange(file, rows[part], key, folder, redrawn)
        count += len(rows)
    return count


def _check_source(file: Any, config: LossyConfig, rank: int, folder: DeliveryLogFolder) -> None:
    """Raise :class:`BadLog` unless ``file`` is of this run, and of the rank in its name."""
    reference = next(iter(folder.ranks.values()))[0]
    if file is not reference and _config_of(reference) not in (None, config):
        raise BadLog(file.path, file.first, f"is of a run with other loss flags than {reference.path.name}")
    if rank != file.rank:
        raise BadLog(file.path, file.first, f"was written by rank {rank}")


def _config_of(file: LogFile) -> LossyConfig | None:
    try:
        return file.meta.config
    except BadLog:
        return None  # the check of that file reports it


def _check_exchange(
    file: LogFile, rows: LogRows, key: tuple[int, str, str], folder: DeliveryLogFolder, redrawn: Redrawn
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
    first = folder.writers[stream, int(links.destinations[0])][0]
    if first != file.rank:
        other = folder.file(first, iteration)
        theirs = other.exchange(iteration, phase, stream) if other is not None else None
        if theirs is not None and not _equal(rows, theirs):
            raise bad(f"ranks {first} and {file.rank} recorded different losses")


def _equal(rows: LogRows, theirs: LogRows) -> bool:
    return (
        len(rows) == len(theirs)
        and all(
            np.array_equal(getattr(rows, name), getattr(theirs, name)) for name in ("bucket", "source", "destination")
        )
        and np.array_equal(rows.lost, theirs.lost)
        and rows.bitmap.equals(theirs.bitmap)
        and rows.digest.equals(theirs.digest)
    )


def _missing_ranks(folder: DeliveryLogFolder) -> list[str]:
    try:
        streams = {name for name, _ in folder.writers}
        missing = [
            f"no records of rank {rank} of {stream}"
            for stream in sorted(streams)
            for rank in range(folder.size(stream))
            if (stream, rank) not in folder.writers
        ]
    except BadLog:
        return []  # reported already
    return missing
