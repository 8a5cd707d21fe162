"""The result of ``verify``, its way through the files of a rank, and where files must be from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..config import LossyConfig
from .reader import BadLog, DeliveryLogFolder


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

    def narrow(self, rank: int, good: tuple[int, int] | None) -> None:
        """Restrict the usable iterations of ``rank`` to ``good``, those of its records beside the deliveries."""
        one, self.usable[rank] = self.usable.get(rank), None
        if one is None or good is None:
            return
        first, last = max(one[0], good[0]), min(one[1], good[1])
        self.usable[rank] = (first, last) if first <= last else None

    def text(self, folder: Path) -> str:
        """The result in lines for people."""
        ranges = [part for part in self.usable.values() if part is not None]
        first, last = max((part[0] for part in ranges), default=0), min((part[1] for part in ranges), default=-1)
        rest = "no iteration is usable for all ranks"
        if len(ranges) == len(self.usable) and first <= last:
            rest = f"iterations {first} to {last} are usable for all ranks"
        return "\n".join([*self.problems, f"{folder}: {self.rows:,} good {self.what}; {rest}"])


def check_files(
    rank: int, files: Sequence[Any], check: Callable[[Any], int], what: str, verdict: Verdict
) -> tuple[int, int] | None:
    """Check the files of a rank one after another and note the first problem. Returns the usable range before it."""
    good = None
    for number, file in enumerate(files):
        previous = files[number - 1] if number else None
        if previous is not None and file.first > previous.last + 1:
            verdict.problems.append(f"rank {rank}: no {what} of iterations {previous.last + 1} to {file.first - 1}")
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


def check_source(file: Any, config: LossyConfig, rank: int, folder: DeliveryLogFolder) -> None:
    """Raise :class:`BadLog` unless ``file`` is of the run in ``folder``, and of the rank in its name.

    ``config``, ``rank``: those in the file's own note.
    """
    reference = next(iter(folder.ranks.values()))[0]
    if file is not reference and config_of(folder) not in (None, config):
        raise BadLog(file.path, file.first, f"is of a run with other loss flags than {reference.path.name}")
    if rank != file.rank:
        raise BadLog(file.path, file.first, f"was written by rank {rank}")


def config_of(folder: DeliveryLogFolder) -> LossyConfig | None:
    """The flags of the first file of ``folder``; ``None`` if it is bad, which the check of that file reports."""
    try:
        return next(iter(folder.ranks.values()))[0].meta.config
    except BadLog:
        return None
