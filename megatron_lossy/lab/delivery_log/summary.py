"""``summary``: number and place of losses, and what mechanisms add."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ...base.flags import as_flag
from ...config import PHASES, RATES, LossyConfig, given
from ...delivery_log.events import Kinds, Row, all_kinds, event_files, percent, read_events
from ...delivery_log.reader import DeliveryLogFolder, LogRows


def scan(folder: DeliveryLogFolder) -> Iterator[LogRows]:
    """Yield the rows of every exchange, rank by rank, in the order of iterations.

    Records of several ranks (peers of tensor parallelism, a tied embedding) come once, from the first of these ranks.
    Raise :class:`~megatron_lossy.delivery_log.reader.BadLog`.
    """
    for rank, files in folder.ranks.items():
        done = -1
        for file in files:
            for group in range(len(file.groups)):
                rows = file.read(group)
                for (iteration, _, stream), part in rows.exchanges.items():
                    if iteration > done and folder.writers[stream, int(rows.destination[part.start])][0] == rank:
                        yield rows[part]
            done = max(done, file.last)


class Rates:
    """Units sent and lost on every link of one phase of one stream: integers [N, N], source by destination."""

    def __init__(self, size: int) -> None:
        self.sent = np.zeros((size, size), dtype=np.int64)
        self.lost = np.zeros((size, size), dtype=np.int64)

    def add(self, rows: LogRows) -> None:
        """Take in the rows of one exchange."""
        np.add.at(self.sent, (rows.source, rows.destination), rows.units)
        np.add.at(self.lost, (rows.source, rows.destination), rows.lost)

    @property
    def rates(self) -> np.ndarray:
        """float64[N, N]: the share of units lost; no number where nothing was sent."""
        return np.divide(self.lost, self.sent, out=np.full(self.sent.shape, np.nan), where=self.sent > 0)

    @property
    def mean(self) -> float:
        """The share of units lost over all links."""
        return float(self.lost.sum() / max(1, self.sent.sum()))


def summarize(folder: DeliveryLogFolder) -> dict[str, dict[str, Rates]]:
    """Return the counts of the log by phase and stream. Raise :class:`~megatron_lossy.delivery_log.reader.BadLog`."""
    found: dict[str, dict[str, Rates]] = defaultdict(dict)
    for rows in scan(folder):
        phase, stream = str(rows.phase[0]), str(rows.stream[0])
        if stream not in found[phase]:
            found[phase][stream] = Rates(folder.size(stream))
        found[phase][stream].add(rows)
    return found


def summary_text(folder: DeliveryLogFolder) -> str:
    """Return the summary for people."""
    config = folder.files[0].meta.config
    covered = [folder.covered(rank) for rank in folder.ranks]
    iterations = sum(last - first + 1 for ranges in covered for first, last in ranges)
    size = sum(file.path.stat().st_size for file in folder.files)
    first, last = min(ranges[0][0] for ranges in covered), max(ranges[-1][1] for ranges in covered)
    lines = [
        (
            f"{folder.path}: iterations {first} to {last}, {len(folder.files)} files of {len(folder.ranks)} writing ranks, "
            f"{size:,} bytes, {size / iterations:,.1f} per iteration and writing rank"
        ),
        f"flags: {' '.join(as_flag(LossyConfig, name, value) for name, value in given(config).items())}",
    ]
    found = summarize(folder)
    for phase in RATES:
        if not found.get(phase) and phase in PHASES:
            lines += ["", f"{phase}: nothing recorded, nothing lost"]
        for stream, rates in sorted(found.get(phase, {}).items()):
            lines += ["", f"{phase}, {stream}, {len(rates.sent)} ranks", *_lines(rates)]
    return "\n".join([*lines, *event_lines(folder)])


def event_lines(folder: DeliveryLogFolder) -> list[str]:
    """Return the lines of all kinds of events about those in ``folder``. Raise :class:`BadLog`."""
    files = event_files(folder.path)

    def rows(kinds: type[Kinds]) -> Iterator[tuple[int, Row]]:
        for file in files:
            yield from ((file.rank, row) for row in read_events(file)[0].to_pylist() if row["kind"] in kinds.names)

    return [line for kinds in all_kinds() for line in kinds.summary(rows(kinds))]


def _lines(counts: Rates) -> list[str]:
    rates = counts.rates
    low, high = (np.unravel_index(pick(rates), rates.shape) for pick in (np.nanargmin, np.nanargmax))
    return [
        f"  lost      {counts.lost.sum():,} of {counts.sent.sum():,} units, {percent(counts.mean)}",
        (
            f"  per link  lowest {percent(rates[low])} ({low[0]} to {low[1]}), mean {percent(np.nanmean(rates))}, "
            f"highest {percent(rates[high])} ({high[0]} to {high[1]})"
        ),
    ]
