"""``summary``: number and place of losses, lengths of bursts, ages of parameters, and what mechanisms add."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ..base.flags import as_flag
from ..config import PHASES, RATES, LossyConfig, given
from .events import Kinds, Row, all_kinds, event_files, read_events
from .reader import DeliveryLogFolder, Links, LogFile, LogRows


def scan(folder: DeliveryLogFolder) -> Iterator[tuple[LogFile, LogRows]]:
    """Yield the rows of every exchange with the file they are in, rank by rank, in the order of iterations.

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
                        yield file, rows[part]
            done = max(done, file.last)


def percent(share: float) -> str:
    """Return ``share`` for people."""
    return f"{100 * share:.2f} %"


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


class Counts:
    """The number of occurrences of each whole number from 0 on."""

    def __init__(self) -> None:
        self.counts = np.zeros(1, dtype=np.int64)

    def add(self, values: np.ndarray) -> None:
        """Count ``values``, integers of any shape."""
        more = np.bincount(values.reshape(-1), minlength=len(self.counts))
        more[: len(self.counts)] += self.counts
        self.counts = more

    @property
    def total(self) -> int:
        """The number of counted values."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """The mean of the counted values."""
        return float(self.counts @ np.arange(len(self.counts))) / max(1, self.total)

    @property
    def largest(self) -> int:
        """The largest counted value."""
        return int(np.flatnonzero(self.counts)[-1]) if self.total else 0

    def text(self, first: int, most: int = 6) -> str:
        """Return shares of the values from ``first`` on; the last one of ``most`` includes all larger values."""
        shares = self.counts[first:] / max(1, self.counts[first:].sum())
        words = [f"{first + k}: {100 * share:.1f} %" for k, share in enumerate(shares[: most - 1])]
        if len(shares) >= most:
            words.append(f"{first + most - 1} and more: {100 * shares[most - 1 :].sum():.1f} %")
        return ", ".join(words)


class Bursts:
    """Lengths of runs of lost units on a link, in the order of units through all iterations. Only ended runs count."""

    def __init__(self, links: int) -> None:
        self._open = np.zeros(links, dtype=np.int64)  # the length so far of each link's present run

    def add(self, lost: np.ndarray, lengths: Counts) -> None:
        """Take in ``lost`` bool[L, units] of the next exchange, and count the lengths of runs that end in it."""
        units = lost.shape[1]
        edges = np.diff(np.pad(lost, ((0, 0), (1, 1))).astype(np.int8), axis=1)
        link, start = np.nonzero(edges == 1)
        end = np.nonzero(edges == -1)[1]
        length = end - start
        goes_on = start == 0
        length[goes_on] += self._open[link[goes_on]]
        lengths.add(self._open[(self._open > 0) & ~lost[:, 0]])
        lengths.add(length[end < units])
        self._open = np.zeros_like(self._open)
        self._open[link[end == units]] = length[end == units]


class Part:
    """The counts of one phase of one stream."""

    def __init__(self, size: int) -> None:
        self.rates = Rates(size)
        self.bursts, self.ages = Counts(), Counts()
        self.complete = True  # every row had a bitmap, or had lost nothing
        self._runs: dict[int, Bursts] = {}
        self._age: dict[int, np.ndarray] = {}

    def follow(self, rank: int, links: Links) -> None:
        """Count bursts, and ages of the units that the update lost, on the links that ``rank`` recorded."""
        self.complete &= bool(links.known.all())
        if not self.complete:
            return
        lost = ~links.arrived
        if rank not in self._runs:
            self._runs[rank] = Bursts(len(lost))
            self._age[rank] = np.zeros(lost.shape, dtype=np.int64)
        self._runs[rank].add(lost, self.bursts)
        self._age[rank] = np.where(lost, self._age[rank] + 1, 0)
        self.ages.add(self._age[rank])


def summarize(folder: DeliveryLogFolder) -> dict[str, dict[str, Part]]:
    """Return the counts of the log by phase and stream. Raise :class:`~megatron_lossy.delivery_log.reader.BadLog`."""
    parts: dict[str, dict[str, Part]] = defaultdict(dict)
    for file, rows in scan(folder):
        phase, stream = str(rows.phase[0]), str(rows.stream[0])
        if stream not in parts[phase]:
            parts[phase][stream] = Part(folder.size(stream))
        part = parts[phase][stream]
        part.rates.add(rows)
        part.follow(file.rank, file.links(rows))
    return parts


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
    parts = summarize(folder)
    for phase in RATES:
        if not parts.get(phase) and phase in PHASES:
            lines += ["", f"{phase}: nothing recorded, nothing lost"]
        for stream, part in sorted(parts.get(phase, {}).items()):
            lines += ["", f"{phase}, {stream}, {len(part.rates.sent)} ranks", *_part_lines(phase, part)]
    return "\n".join([*lines, *event_lines(folder)])


def event_lines(folder: DeliveryLogFolder) -> list[str]:
    """Return the lines of all kinds of events about those in ``folder``. Raise :class:`BadLog`."""
    files = event_files(folder.path)

    def rows(kinds: type[Kinds]) -> Iterator[tuple[int, Row]]:
        for file in files:
            yield from ((file.rank, row) for row in read_events(file)[0].to_pylist() if row["kind"] in kinds.names)

    return [line for kinds in all_kinds() for line in kinds.summary(rows(kinds))]


def _part_lines(phase: str, part: Part) -> list[str]:
    rates = part.rates.rates
    low, high = (np.unravel_index(pick(rates), rates.shape) for pick in (np.nanargmin, np.nanargmax))
    lines = [
        f"  lost      {part.rates.lost.sum():,} of {part.rates.sent.sum():,} units, {percent(part.rates.mean)}",
        (
            f"  per link  lowest {percent(rates[low])} ({low[0]} to {low[1]}), mean {percent(np.nanmean(rates))}, "
            f"highest {percent(rates[high])} ({high[0]} to {high[1]})"
        ),
    ]
    if not part.complete:
        return [*lines, "  bursts and ages are not known: packets were recorded without bitmaps"]
    if part.bursts.total:
        lines.append(
            f"  bursts    {part.bursts.total:,}, mean {part.bursts.mean:.2f} units, longest {part.bursts.largest}; "
            + part.bursts.text(1)
        )
    if phase == "param":
        lines.append(f"  ages      mean {part.ages.mean:.3f} updates, oldest {part.ages.largest}; " + part.ages.text(0))
    return lines
