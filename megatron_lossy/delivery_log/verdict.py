"""What ``verify`` finds out."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Verdict:
    """``problems``: one line each, empty if all is well. ``rows`` that were read, of which ``unchecked`` were only read.

    ``what``: these rows. ``usable``: by rank, the inclusive range of iterations before the first problem or gap; ``None``
    without any.
    """

    what: str = "records"
    problems: list[str] = field(default_factory=list)
    rows: int = 0
    unchecked: int = 0
    usable: dict[int, tuple[int, int] | None] = field(default_factory=dict)

    def text(self, folder: Path) -> str:
        """For people."""
        ranges = [part for part in self.usable.values() if part is not None]
        first, last = max((part[0] for part in ranges), default=0), min((part[1] for part in ranges), default=-1)
        rest = "no iteration is usable for all ranks"
        if len(ranges) == len(self.usable) and first <= last:
            rest = f"iterations {first} to {last} are usable for all ranks"
        unchecked = (
            f", {self.unchecked:,} of them of an earlier version, which were only read" if self.unchecked else ""
        )
        return "\n".join([*self.problems, f"{folder}: {self.rows:,} good {self.what}{unchecked}; {rest}"])
