"""``verify``: checks that every record of a delivery log can be read and is as it was written."""

from __future__ import annotations

import numpy as np

from ..base.exchange import Exchange, Stream
from ..base.registry import MECHANISMS
from ..config import RATES
from .reader import BadLog, DeliveryLogFolder, LogFile, LogRows
from .replay import Redrawn
from .verdict import Verdict, check_files, check_source


def verify(folder: DeliveryLogFolder) -> Verdict:
    """Read everything; check rows, bitmaps, digests, gaps, missing ranks, and that ranks agree."""
    verdict = Verdict()
    redrawn = Redrawn()
    for rank, files in folder.ranks.items():
        verdict.usable[rank] = check_files(
            rank, files, lambda file: _check_file(file, folder, redrawn), "records", verdict
        )
    verdict.problems += _missing_ranks(folder)
    for mechanism in MECHANISMS.all():
        mechanism.verify_log(folder, verdict)
    return verdict


def _check_file(file: LogFile, folder: DeliveryLogFolder, redrawn: Redrawn) -> int:
    check_source(file, file.meta.config, file.meta.rank, folder)
    count = 0
    for group in range(len(file.groups)):
        rows = file.read(group)
        for key, part in rows.exchanges.items():
            _check_exchange(file, rows[part], key, folder, redrawn)
        count += len(rows)
    return count


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
