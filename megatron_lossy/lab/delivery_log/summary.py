"""``summary``: number and place of losses, and what mechanisms add."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator

import numpy as np

from ...base.flags import as_flag
from ...config import PHASES, RATES, LossyConfig, given
from ...delivery_log.events import Row, event_files, read_events
from ...delivery_log.reader import DeliveryLogFolder, LogRows
from ...mechanisms.boundaries.flags import BOUNDARY_PHASES


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
    files = f"{len(folder.files)} files of {len(folder.ranks)} writing ranks"
    bytes_each = f"{size:,} bytes, {size / iterations:,.1f} per iteration and writing rank"
    flags = " ".join(as_flag(LossyConfig, name, value) for name, value in given(config).items())
    lines = [f"{folder.path}: iterations {first} to {last}, {files}, {bytes_each}", f"flags: {flags}"]
    found = summarize(folder)
    for phase in RATES:
        if not found.get(phase) and phase in PHASES:
            lines += ["", f"{phase}: nothing recorded, nothing lost"]
        for stream, rates in sorted(found.get(phase, {}).items()):
            lines += ["", f"{phase}, {stream}, {len(rates.sent)} ranks", *_lines(rates)]
    rows = ((file.rank, row) for file in event_files(folder.path) for row in read_events(file)[0].to_pylist())
    for (phase, stream), total in sorted(message_totals(rows).items()):
        lines += ["", f"{phase}, {stream}, after layer {total['layer']} of {total['layers']}", *_message_lines(total)]
    return "\n".join(lines)


def percent(share: float) -> str:
    """Return ``share`` for people."""
    return f"{100 * share:.2f} %"


def _lines(counts: Rates) -> list[str]:
    rates = counts.rates
    ends = (np.unravel_index(pick(rates), rates.shape) for pick in (np.nanargmin, np.nanargmax))
    low, high = (f"{percent(rates[link])} ({link[0]} to {link[1]})" for link in ends)
    return [
        f"  lost      {counts.lost.sum():,} of {counts.sent.sum():,} units, {percent(counts.mean)}",
        f"  per link  lowest {low}, mean {percent(np.nanmean(rates))}, highest {high}",
    ]


def message_totals(rows: Iterable[tuple[int, Row]]) -> dict[tuple[str, str], Counter[str]]:
    """Return sums over the messages of each phase and stream. ``rows``: each with the rank that wrote it.

    ``asked``: packets that were sent again. ``layer`` and ``layers`` are those of the boundary.
    """
    found: dict[tuple[str, str], tuple[int, Counter[str]]] = {}
    for writer, row in rows:
        if row["kind"] not in BOUNDARY_PHASES:
            continue
        # Peers of tensor parallelism record the same.
        first, total = found.setdefault((row["kind"], row["stream"]), (writer, Counter()))
        if first == writer:
            total.update({name: int(row[name]) for name in ("packets", "lost", "repaired", "again", "zeros")})
            total.update(messages=1, asked=(row["lost"] - row["repaired"]) * row["again"])
            total["layer"], total["layers"] = row["layer"], row["layers"]
    return {key: total for key, (_, total) in found.items()}


def _message_lines(total: Counter[str]) -> list[str]:
    def share(count: str, of: str) -> str:
        return percent(total[count] / max(1, total[of]))

    again = f"{total['again']:,} of {total['messages']:,} messages, {share('again', 'messages')} of these"
    return [
        f"  lost      {total['lost']:,} of {total['packets']:,} packets, {share('lost', 'packets')}",
        f"  repaired  {total['repaired']:,} by parity, {share('repaired', 'lost')} of lost packets",
        f"  again     {total['asked']:,} packets of {again}",
        f"  zeros     {total['zeros']:,} packets, {share('zeros', 'packets')}",
    ]
