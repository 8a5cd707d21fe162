"""Results of the benchmark: cells, and their tables."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.exchange.contestants import PHASES, RankTimes, span
from benchmarks.exchange.rows import Row
from benchmarks.lab import Counters

_EXPLANATION = (
    "Between two ranks unless a row says otherwise. A row is: megabytes (10^6 bytes) that a rank sends in an exchange, "
    "round-trip time, rate and queue in each direction, share of packets lost. The time of an exchange is that "
    "from the last rank's start to the last rank's end. Contestants take turns in one run. "
    "Ideal: the bytes, without headers, at the rate of the link. An exchange over a time limit is not waited for, "
    "nor tried at more loss or size. With fewer than 100 exchanges P99 is nearly the slowest."
)
_CPU = (
    "CPU seconds are those of the ranks' processes. The kernel's work for an arriving packet happens in the "
    "emulator's, for every contestant alike."
)


@dataclass
class Cell:
    """One contestant's exchanges of one phase over one link. ``too_slow``: the seconds that one of them exceeded."""

    row: Row
    name: str
    phase: str
    too_slow: float | None = None
    times: list[float] = field(default_factory=list)  # ms
    cpu: float = 0.0
    busiest: float = 0.0
    seen: list[float] = field(default_factory=list)
    packets: int = 0
    lost: int = 0
    overflowed: int = 0

    def add(self, done: Sequence[RankTimes], links: Sequence[Counters]) -> None:
        """Add one exchange: the records of its ranks and, meanwhile, of the links."""
        started, ended = span(done)
        self.times.append(1000 * (ended - started))
        self.cpu += sum(rank.cpu for rank in done)
        self.busiest += sum(rank.busiest for rank in done)
        self.seen.append(float(np.mean([rank.lost for rank in done])))
        for link in links:
            self.packets += link.packets
            self.lost += link.lost
            self.overflowed += link.overflowed

    def time(self, percent: float) -> float:
        """Return milliseconds of an exchange, as a percentile; infinite where one never ended."""
        if self.too_slow is not None or not self.times:
            return float("inf")
        return float(np.percentile(self.times, percent))

    @property
    def cpu_per_gigabyte(self) -> float:
        """CPU seconds of all ranks over the gigabytes that they sent."""
        return self._per_gigabyte(self.cpu)

    @property
    def busiest_per_gigabyte(self) -> float:
        """CPU seconds of a rank's busiest thread over the gigabytes that the rank sent: what bounds its speed."""
        return self._per_gigabyte(self.busiest)

    def _per_gigabyte(self, seconds: float) -> float:
        sent = 1e-3 * self.row.megabytes * self.row.ranks * len(self.times)
        return seconds / sent if sent else float("nan")

    def share(self, packets: int) -> float:
        """Return ``packets`` as a share of the packets that came to the links."""
        return packets / self.packets if self.packets else 0.0

    def __str__(self) -> str:
        if self.too_slow is not None or not self.times:
            return f"{self.row} | {self.phase} | {self.name}: over {self.too_slow or 0:g} s"
        return (
            f"{self.row} | {self.phase} | {self.name}: {self.time(50):.1f} ms ({self.time(0):.1f}; P95 "
            f"{self.time(95):.1f}; {len(self.times)}), {self.cpu_per_gigabyte:.2f} CPU s/GB, link lost "
            f"{self.share(self.lost):.2%} + {self.share(self.overflowed):.2%}, seen {np.mean(self.seen):.2%}"
        )


@dataclass
class Share:
    """Mbit/s of payload that flows got of one link, in each direction."""

    names: list[str]
    rates: list[float]
    row: Row

    def __str__(self) -> str:
        total = sum(self.rates)
        parts = ", ".join(
            f"{name} {rate:.0f} Mbit/s ({rate / total:.0%})" for name, rate in zip(self.names, self.rates)
        )
        return f"{self.row}: {parts}"


def _grouped(cells: Sequence[Cell]) -> tuple[list[Row], list[str], dict[tuple[Row, str, str], Cell]]:
    rows, names = dict.fromkeys(cell.row for cell in cells), dict.fromkeys(cell.name for cell in cells)
    return list(rows), list(names), {(cell.row, cell.name, cell.phase): cell for cell in cells}


def _milliseconds(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}"


def markdown(
    cells: Sequence[Cell],
    shares: Sequence[Share],
    notes: Sequence[str],
    header: Sequence[str],
    last: Sequence[str] = (),
) -> str:
    """Return all tables, under ``header``, one sentence each in ``notes``; then the lines ``last``."""
    rows, names, at = _grouped(cells)
    lines = ["# Exchanges over emulated links", "", *(f"- {line}" for line in (*header, *notes)), ""]
    lines += [_EXPLANATION, ""]

    def table(title: str, text: Callable[[Cell], str], phase: str, first: Callable[[Row], str] | None = None) -> None:
        head = ["link", *(["ideal"] if first else []), *names]
        lines.extend([f"## {title}", "", f"| {' | '.join(head)} |", "|" + " --- |" * len(head)])
        for row in rows:
            texts = [first(row)] if first else []
            for name in names:
                cell = at.get((row, name, phase))
                if cell is None or not (cell.times or cell.too_slow):
                    texts.append("")
                elif cell.too_slow is not None:
                    texts.append(f"over {cell.too_slow:g} s")
                else:
                    texts.append(text(cell))
            lines.append(f"| {row} | {' | '.join(texts)} |")
        lines.append("")

    def ideal(row: Row) -> str:
        return "" if row.ideal is None else _milliseconds(row.ideal)

    for phase in PHASES if cells else ():
        title = phase.capitalize()
        table(
            f"{title}: milliseconds, median (minimum)",
            lambda cell: f"{_milliseconds(cell.time(50))} ({_milliseconds(cell.time(0))})",
            phase,
            ideal,
        )
        table(
            f"{title}: milliseconds, P95 / P99 (exchanges)",
            lambda cell: f"{_milliseconds(cell.time(95))} / {_milliseconds(cell.time(99))} ({len(cell.times)})",
            phase,
        )
        table(
            f"{title}: CPU seconds per GB, all ranks (the busiest thread of a rank, per GB that the rank sends)",
            lambda cell: f"{cell.cpu_per_gigabyte:.2f} ({cell.busiest_per_gigabyte:.2f})",
            phase,
        )
        table(
            f"{title}: lost on the link + overflowed its queue; not received in the end",
            lambda cell: f"{cell.share(cell.lost):.2%} + {cell.share(cell.overflowed):.2%}; {np.mean(cell.seen):.2%}",
            phase,
        )
    if cells:
        lines += [_CPU, ""]
    if shares:
        lines += ["## Two flows over one link", "", f"{shares[0].row}. Mbit/s of payload, in each direction.", ""]
        lines += ["| flows | first | second |", "| --- | --- | --- |"]
        for share in shares:
            total = sum(share.rates)
            texts = (f"{rate:.0f} ({rate / total:.0%})" for rate in share.rates)
            lines.append(f"| {' and '.join(share.names)} | {' | '.join(texts)} |")
        lines.append("")
    return "\n".join([*lines, *last])


def table_of(cells: Sequence[Cell]) -> str:
    """Return a line of CSV for each cell."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    row_fields = ["part", "megabytes", "rtt", "loss", "burst", "rate", "queue", "reorder", "duplicate"]
    row_fields += ["wire", "offload", "ranks"]
    measured = ("exchanges", "median ms", "minimum ms", "P95 ms", "P99 ms", "CPU s per GB")
    losses = ("packets", "lost on the link", "overflowed", "share not received", "over seconds")
    out.writerow([*row_fields, "contestant", "phase", *measured, *losses])
    for cell in cells:
        numbers = [*(cell.time(percent) for percent in (50, 0, 95, 99)), cell.cpu_per_gigabyte]
        values = [f"{number:.3f}" if np.isfinite(number) else "" for number in numbers]
        fields = [getattr(cell.row, name) for name in row_fields]
        seen = f"{np.mean(cell.seen):.6f}" if cell.seen else ""
        counts = [cell.packets, cell.lost, cell.overflowed, seen, cell.too_slow]
        out.writerow([*fields, cell.name, cell.phase, len(cell.times), *values, *counts])
    return text.getvalue()
