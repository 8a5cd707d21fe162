"""Losses at boundaries between pipeline stages, in the ``summary`` of a delivery log."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ...delivery_log.scan import percent
from .flags import BOUNDARY_PHASES
from .log import Crossings, boundary_files
from .loss import Boundary


@dataclass
class Crossed:
    """The counts of one phase at one ``boundary``."""

    boundary: Boundary
    total: Counter[str] = field(default_factory=Counter)

    def add(self, these: Crossings) -> None:
        """Take in the messages of an iteration."""
        self.total["messages"] += len(these.message)
        for name in ("packets", "lost", "repaired", "again", "zeros"):
            self.total[name] += int(getattr(these, name).sum())
        self.total["asked"] += int(((these.lost - these.repaired) * these.again).sum())

    def lines(self) -> list[str]:
        """The counts in lines for people."""
        total = self.total
        return [
            f"  lost      {total['lost']:,} of {total['packets']:,} packets, {_share(total['lost'], total['packets'])}",
            f"  repaired  {total['repaired']:,} by parity, {_share(total['repaired'], total['lost'])} of what was lost",
            (
                f"  again     {total['asked']:,} packets of {total['again']:,} of {total['messages']:,} messages, "
                f"{_share(total['again'], total['messages'])} of these"
            ),
            f"  zeros     {total['zeros']:,} packets, {_share(total['zeros'], total['packets'])}",
        ]


def _share(count: int, of: int) -> str:
    return percent(count / max(1, of))


def summarize_boundaries(folder: Path) -> dict[tuple[str, str], Crossed]:
    """The counts of boundaries by phase and stream. Raises :class:`~megatron_lossy.delivery_log.reader.BadLog`."""
    found: dict[tuple[str, str], tuple[int, Crossed]] = {}
    for rank, files in boundary_files(folder).items():
        for file in files:
            for these in file.crossings():
                key = these.phase, these.stream
                # Peers of tensor parallelism record the same.
                writer, crossed = found.setdefault(key, (rank, Crossed(file.boundary(these.stream))))
                if writer == rank:
                    crossed.add(these)
    return {key: crossed for key, (_, crossed) in found.items()}


def summary_lines(folder: Path) -> list[str]:
    """The summary for people."""
    boundaries, lines = summarize_boundaries(folder), []
    for phase, stream in sorted(boundaries, key=lambda key: (BOUNDARY_PHASES.index(key[0]), key[1])):
        crossed = boundaries[phase, stream]
        where = f"after layer {crossed.boundary.layer} of {crossed.boundary.layers}"
        lines += ["", f"{phase}, {stream}, {where}", *crossed.lines()]
    return lines
