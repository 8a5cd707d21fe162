"""What comes out of the benchmark: cells, and their tables and picture."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib import ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.exchange.contestants import PHASES, Done, span
from benchmarks.exchange.rows import Row
from benchmarks.lab import Counters

_COLOURS = {"ours": "#d62728", "gloo bbr": "#1f77b4", "gloo reno": "#17becf", "tcp bbr": "#2ca02c"}
_OTHER_COLOUR = "#7f7f7f"
_EXPLANATION = (
    "Between two ranks unless a row says otherwise. A row is: megabytes (10^6 bytes) that a rank sends in an exchange, "
    "round-trip time, rate and queue in each direction, share of packets lost. The time of an exchange is that "
    "from the last rank's start to the last rank's end. Contestants take turns in one run. "
    "Ideal: the bytes, without headers, at the rate of the link. What takes longer than a limit is not waited for, "
    "nor tried at more loss or size. With fewer than 100 exchanges P99 is nearly the slowest."
)
_CPU = (
    "CPU seconds are those of the ranks' processes. What the kernel does for a packet that arrives happens in the "
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

    def add(self, done: Sequence[Done], links: Sequence[Counters]) -> None:
        """One exchange: what its ranks and, meanwhile, the links did."""
        started, ended = span(done)
        self.times.append(1000 * (ended - started))
        self.cpu += sum(one.cpu for one in done)
        self.busiest += sum(one.busiest for one in done)
        self.seen.append(float(np.mean([one.lost for one in done])))
        for link in links:
            self.packets += link.packets
            self.lost += link.lost
            self.overflowed += link.overflowed

    def time(self, percent: float) -> float:
        """Milliseconds of an exchange, as a percentile; infinite where one never ended."""
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
        """``packets`` as a share of what came to the links."""
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
    """All tables, under ``header``, one sentence each in ``notes``; then the lines ``last``."""
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
    """A line of CSV for each cell."""
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


def picture(cells: Sequence[Cell], path: Path) -> None:
    """Time over loss, a panel for each round-trip time and size of the grid; then a bar for each other row."""
    grid = [cell for cell in cells if cell.row.part == "grid"]
    others = [cell for cell in cells if cell.row.part != "grid"]
    rtts = sorted({cell.row.rtt for cell in grid})
    sizes = sorted({cell.row.megabytes for cell in grid})
    losses = sorted({cell.row.loss for cell in grid})
    other_rows = list(dict.fromkeys(cell.row for cell in others))
    wide, high = max(len(rtts), 1), len(sizes)
    bars = 0.8 + 0.5 * len(other_rows) if others else 0.0
    figure = Figure(figsize=(max(5.2 * wide, 9.0), 4.2 * high + bars + 0.9), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    names = list(dict.fromkeys(cell.name for cell in cells))
    # Two figures, so that the names of rows do not push the panels aside.
    upper, lower = figure.subfigures(2, 1, height_ratios=(4.2 * high or 1e-3, bars or 1e-3))
    handles = {}
    for down, size in enumerate(sizes):
        shared = None
        for right, rtt in enumerate(rtts):
            axes = shared = upper.add_subplot(high, wide, down * wide + right + 1, sharey=shared)
            for name in names:
                for phase, style in zip(PHASES, ("-", "--")):
                    found = {
                        cell.row.loss: cell
                        for cell in grid
                        if (cell.row.rtt, cell.row.megabytes, cell.name, cell.phase) == (rtt, size, name, phase)
                        and np.isfinite(cell.time(50))
                    }
                    places = [losses.index(loss) for loss in sorted(found)]
                    drawn = [found[loss] for loss in sorted(found)]
                    colour = _COLOURS.get(name, _OTHER_COLOUR)
                    medians = [cell.time(50) for cell in drawn]
                    (line,) = axes.plot(places, medians, style, marker="o", markersize=4, color=colour)
                    handles.setdefault(name, line)
                    slow = [cell for cell in grid if cell.too_slow is not None and cell.phase == phase]
                    for cell in slow:
                        if (cell.row.rtt, cell.row.megabytes, cell.name) == (rtt, size, name):
                            where = losses.index(cell.row.loss)
                            (mark,) = axes.plot(where, 1000 * cell.too_slow, "^", markersize=8, color=colour)
                            handles.setdefault("over the limit", mark)
                    if phase == PHASES[0]:
                        low, top = ([cell.time(percent) for cell in drawn] for percent in (0, 95))
                        axes.fill_between(places, low, top, color=colour, alpha=0.13, linewidth=0)
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
            axes.set_xlim(-0.3, len(losses) - 0.7)
            axes.set_xticks(range(len(losses)), [f"{100 * loss:g}" for loss in losses])
            axes.set_title(f"{size:g} MB, round trip {rtt:g} ms", fontsize=12)
            axes.set_xlabel("packets lost (%)")
            if right == 0:
                axes.set_ylabel("milliseconds per exchange")
            axes.grid(True, which="major", alpha=0.35)
            axes.grid(True, which="minor", axis="y", alpha=0.12)
    if others:
        axes = lower.add_subplot()
        thick = 0.8 / len(names)
        for index, name in enumerate(names):
            found = {cell.row: cell for cell in others if cell.name == name and cell.phase == PHASES[0]}
            for place, row in enumerate(other_rows):
                if row in found and np.isfinite(found[row].time(50)):
                    where = place + (index - (len(names) - 1) / 2) * thick
                    bar = axes.barh(where, found[row].time(50), thick, color=_COLOURS.get(name, _OTHER_COLOUR))
                    handles.setdefault(name, bar)
        for place, row in enumerate(other_rows):
            if row.ideal is not None:
                (mark,) = axes.plot([row.ideal] * 2, [place - 0.45, place + 0.45], color="black", linewidth=1.5)
                handles.setdefault("ideal", mark)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.set_yticks(range(len(other_rows)), list(map(str, other_rows)), fontsize=10)
        axes.set_ylim(len(other_rows) - 0.5, -0.5)
        axes.set_xlim(left=10 ** np.floor(np.log10(axes.get_xlim()[0])))
        axes.set_xlabel("milliseconds per reduce-scatter, median")
        axes.grid(True, axis="x", alpha=0.35)
    if grid:
        upper.suptitle("Solid: reduce-scatter, with a band from minimum to P95; dashed: all-gather", fontsize=11)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles), fontsize=11)
    figure.savefig(path, format="png")
