"""``python -m benchmarks.fct``: completion times between two data centers, by scheme of recovery.

A file is YAML::

    title: Gradients between two data centers
    megabytes: [0.26, 1.05]            # of a message, 10^6 bytes
    rates: [0, 0.01, 0.05]
    timeouts: [2, 1, 4]                # round trips; figures show the first
    bursts: [null, 8]                  # mean packets lost in a row; null: independent losses
    flows: 2000                        # messages per condition
    seed: 1
    pairs: 1                           # of servers that share the link between the data centers
    schemes:
      SR: {recovery: selective-repeat}
      LoWAR (100,10): {recovery: uniform, block: 100, parity: 10}
      SMART: {recovery: smart, block: 100, parity: 50, fraction: 0.01}
    ours: SMART                        # the scheme to compare with the others
    paper: {SR: 91.7, "LoWAR (100,10)": 73.0}    # by how much its P99 is below theirs at most, in percent
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import multiprocessing
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path as FilePath
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.fct.schemes import Adaptive, Losses, Path, Scheme, SelectiveRepeat, Smart, Tolerant, Uniform
from megatron_lossy.base.errors import ArgumentParser, UsageError, refuse, usage_errors
from megatron_lossy.base.files import check_folder, replace_file, write_text
from megatron_lossy.config.settings import read_yaml

_COLORS = ("#c53030", "#dd6b20", "#2b6cb0", "#2f855a", "#6b46c1", "#666666")
_RESAMPLES = 400


@dataclass(frozen=True)
class Condition:
    """A message of ``size`` bytes, a loss rate, and more.

    ``burst``: mean number of losses in a row (``None``: independent). ``timeout``: the RTO in round trips.
    """

    size: float
    rate: float
    timeout: float = 2.0
    burst: float | None = None


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Cell:
    """Completion times in microseconds under one condition.

    ``again``, ``parities``, ``zeros``: packets per packet of data.
    """

    scheme: str
    condition: Condition
    mean: Interval
    median: float
    p99: Interval
    again: float
    parities: float
    zeros: float


def make_scheme(name: str, given: Mapping[str, Any], timeout: float) -> Scheme:
    """Return the scheme that a study calls ``name``. Raise :class:`UsageError` for settings that it does not have."""
    settings = dict(given)
    recovery = settings.pop("recovery", None)
    kinds: dict[str, type[Scheme]] = {
        "selective-repeat": SelectiveRepeat,
        "uniform": Uniform,
        "smart": Smart,
        "tolerant": Tolerant,
        "adaptive": Adaptive,
    }
    if recovery not in kinds:
        raise UsageError(f"schemes: {name}: recovery {recovery}: must be one of {', '.join(kinds)}")
    try:
        return kinds[recovery](timeout=timeout, **settings)
    except TypeError:
        raise UsageError(f"schemes: {name}: {settings}: not settings of {recovery}") from None


def run_cell(name: str, given: Mapping[str, Any], condition: Condition, path: Path, flows: int, seed: int) -> Cell:
    """Send ``flows`` messages, one after another. All schemes have the same losses."""
    scheme = make_scheme(name, given, condition.timeout)
    packets = path.packets(condition.size)
    done = [scheme.flow(path, packets, Losses(condition.rate, seed, flow, condition.burst)) for flow in range(flows)]
    times = np.array([message.time for message in done])
    random = np.random.default_rng(seed)
    resampled = times[random.integers(0, flows, (_RESAMPLES, flows))]
    data = flows * packets
    return Cell(
        name,
        condition,
        _interval(times.mean(), resampled.mean(axis=1)),
        float(np.median(times)),
        _interval(np.percentile(times, 99), np.percentile(resampled, 99, axis=1)),
        again=sum(message.again for message in done) / data,
        parities=sum(message.parities for message in done) / data,
        zeros=sum(message.zeros for message in done) / data,
    )


def _interval(value: float, resampled: np.ndarray) -> Interval:
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Interval(float(value), float(low), float(high))


@dataclass(frozen=True)
class Settings:
    """The content of a file. Raises :class:`UsageError`."""

    title: str
    megabytes: Sequence[float]
    rates: Sequence[float]
    schemes: Mapping[str, Mapping[str, Any]]
    ours: str
    timeouts: Sequence[float] = (2.0,)
    bursts: Sequence[float | None] = (None,)
    flows: int = 2000
    seed: int = 1
    pairs: int = 1
    paper: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("megabytes", "rates", "timeouts", "bursts", "schemes"):
            if not getattr(self, name):
                raise UsageError(f"{name}: must not be empty")
        for size in self.megabytes:
            if not 0 < size <= 1000:
                raise refuse("megabytes:", size, "must be in (0, 1000]")
        for rate in self.rates:
            if not 0 <= rate < 0.5:
                raise refuse("rates:", rate, "must be in [0, 0.5)")
        for timeout in self.timeouts:
            if not timeout > 0:
                raise refuse("timeouts:", timeout, "must be above 0")
        for burst in self.bursts:
            if burst is not None and not burst >= 1 / (1 - max(self.rates)):
                raise refuse("bursts:", burst, "must be null or at least 1 / (1 - the largest rate)")
        for name, least in (("flows", 100), ("pairs", 1)):
            if not getattr(self, name) >= least:
                raise refuse(f"{name}:", getattr(self, name), f"must be at least {least}")
        for name in (self.ours, *self.paper):
            if name not in self.schemes:
                raise UsageError(f"{name}: is none of the schemes ({', '.join(self.schemes)})")
        for name, given in self.schemes.items():
            make_scheme(name, given, self.timeouts[0])

    @property
    def conditions(self) -> list[Condition]:
        """All conditions."""
        axes = itertools.product(self.megabytes, self.timeouts, self.bursts, self.rates)
        return [Condition(1e6 * size, rate, timeout, burst) for size, timeout, burst, rate in axes]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the file that the command line names, print the table and write table, values and figures."""
    parser = ArgumentParser(
        "python -m benchmarks.fct",
        description="How long messages take between two data centers if packets are lost, by scheme of recovery "
        "(docs/fct.md).",
    )
    parser.add_argument("file", metavar="FILE.yaml")
    parser.add_argument("--out", metavar="FOLDER", help="for table, values and figures; default: print only")
    parser.add_argument("--flows", type=int, metavar="N", help="messages per condition; default the file's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--overwrite", action="store_true", help="replace results that are there")
    given = parser.parse_args(arguments)
    if given.jobs < 1:
        raise refuse("--jobs", given.jobs, "must be at least 1")
    settings = read(given.file, {} if given.flows is None else {"flows": given.flows})
    if given.out is not None:
        check_folder("--out", given.out)
        if FilePath(given.out, "fct.csv").exists() and not given.overwrite:
            raise refuse("--out", given.out, "holds results already; --overwrite replaces them")
    cells = run(settings, given.jobs)
    text = markdown(settings, cells, f"python -m benchmarks.fct {given.file}")
    print(text)
    if given.out is None:
        return
    out = FilePath(given.out)
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / "fct.md", text)
    write_text(out / "fct.csv", values(cells))
    replace_file(out / "times.png", lambda aside: draw_times(settings, cells, aside))
    replace_file(out / "gains.png", lambda aside: draw_gains(settings, cells, aside))
    print(f"wrote {out}/fct.md, fct.csv, times.png, gains.png")


def read(file: str, over: Mapping[str, Any]) -> Settings:
    """Return the settings in ``file``, with ``over`` in their place. Raise :class:`UsageError`."""
    said = read_yaml("FILE", file)
    unknown = set(said) - {setting.name for setting in fields(Settings)}
    if unknown:
        raise UsageError(f"{file}: {', '.join(sorted(unknown))}: no such keys")
    try:
        return Settings(**{**said, **over})
    except (TypeError, UsageError) as error:
        raise UsageError(f"{file}: {error}") from None


def run(settings: Settings, jobs: int) -> dict[tuple[str, Condition], Cell]:
    """Run every scheme under every condition."""
    path = Path(pairs=settings.pairs)
    work = [(name, condition) for condition in settings.conditions for name in settings.schemes]
    each = [(name, settings.schemes[name], condition, path, settings.flows, settings.seed) for name, condition in work]
    cells = {}
    with contextlib.ExitStack() as stack:
        done: Iterable[Cell] = itertools.starmap(run_cell, each)
        if jobs > 1:
            pool = stack.enter_context(ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")))
            done = pool.map(run_cell, *zip(*each, strict=True))
        for key, cell in zip(work, done, strict=True):
            cells[key] = cell
            if sys.stderr.isatty():
                print(f"\rcondition {len(cells)} of {len(work)}\x1b[K", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return cells


# --- tables and figures --------------------------------------------------------------------------------------------


def below(ours: Cell, theirs: Cell) -> float:
    """Return the percentage by which our P99 is below theirs."""
    return 100 * (1 - ours.p99.value / theirs.p99.value)


def markdown(settings: Settings, cells: Mapping[tuple[str, Condition], Cell], command: str) -> str:
    """Return the tables as text."""
    path = Path(pairs=settings.pairs)
    made = (
        f"`{command}`: {settings.flows} messages per condition, seed {settings.seed}, {settings.pairs} pair(s) of servers; "
        f"round trip {path.rtt:.0f} µs, a packet every {path.slot:.3f} µs. Completion times in µs, mean / P99. "
        "A model without congestion, not a measurement."
    )
    lines = [f"# {settings.title}", "", made]
    for timeout, burst in itertools.product(settings.timeouts, settings.bursts):
        lines += ["", f"## RTO {timeout:g} round trips, {_burst(burst)}", ""]
        others = [name for name in settings.schemes if name != settings.ours]
        heads = ["message", "loss", *settings.schemes, *(f"P99 against {name}" for name in others)]
        lines += ["| " + " | ".join(heads) + " |", "| " + " | ".join("---" for _ in heads) + " |"]
        for size, rate in itertools.product(settings.megabytes, settings.rates):
            condition = Condition(1e6 * size, rate, timeout, burst)
            row = [cells[name, condition] for name in settings.schemes]
            ours = cells[settings.ours, condition]
            changes = [f"{-below(ours, cells[name, condition]):+.1f} %" for name in others]
            times = [f"{cell.mean.value:,.0f} / {cell.p99.value:,.0f}" for cell in row]
            lines.append("| " + " | ".join([f"{size:g} MB", f"{100 * rate:g} %", *times, *changes]) + " |")
    lines += ["", "## What is claimed", ""]
    for name, claim in settings.paper.items():
        gains = {where: below(cells[settings.ours, where], cells[name, where]) for where in settings.conditions}
        best = max(gains, key=gains.__getitem__)
        reached = gains[best]
        lines.append(
            f"- P99 of {settings.ours} is below that of {name} by up to {reached:.1f} % ({_words(best)}); the paper says up to "
            f"{claim:g} %."
        )
    lines += ["", "## Bytes", "", "| loss | " + " | ".join(settings.schemes) + " |"]
    lines.append("| --- |" + " --- |" * len(settings.schemes))
    largest = max(settings.megabytes)
    for rate in settings.rates:
        condition = Condition(1e6 * largest, rate, settings.timeouts[0], settings.bursts[0])
        row = [cells[name, condition] for name in settings.schemes]
        lines.append(f"| {100 * rate:g} % | " + " | ".join(_extra(cell) for cell in row) + " |")
    lines += ["", f"Packets beyond the data, of {largest:g} MB: parity + sent again, percent; data counted as zeros."]
    return "\n".join(lines) + "\n"


def _burst(burst: float | None) -> str:
    return "independent losses" if burst is None else f"bursts of {burst:g} packets"


def _words(condition: Condition) -> str:
    size, rate = condition.size / 1e6, 100 * condition.rate
    return f"{size:g} MB, {rate:g} %, RTO {condition.timeout:g}, {_burst(condition.burst)}"


def _extra(cell: Cell) -> str:
    zeros = f"; {100 * cell.zeros:.2f}" if cell.zeros else ""
    return f"{100 * cell.parities:.1f} + {100 * cell.again:.2f}{zeros}"


def values(cells: Mapping[tuple[str, Condition], Cell]) -> str:
    """Return all numbers, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    intervals = [f"{name}{end}" for name in ("mean", "p99") for end in ("", "_low", "_high")]
    rest = ["median", "again", "parities", "zeros"]
    writer.writerow(["scheme", "bytes", "rate", "timeout", "burst", *intervals, *rest])
    for (name, condition), cell in cells.items():
        numbers = [*asdict(cell.mean).values(), *asdict(cell.p99).values(), *(getattr(cell, column) for column in rest)]
        writer.writerow(
            [name, f"{condition.size:.0f}", condition.rate, condition.timeout, condition.burst]
            + [f"{number:.6g}" for number in numbers]
        )
    return text.getvalue()


def draw_times(settings: Settings, cells: Mapping[tuple[str, Condition], Cell], path: FilePath) -> None:
    """Draw mean and P99 over the loss rate, for every size (the paper's Figures 3 and 4)."""
    sizes = settings.megabytes
    figure = Figure(figsize=(9, 2.6 * len(sizes) + 0.8), dpi=110, layout="constrained")
    panels = figure.subplots(len(sizes), 2, squeeze=False, sharex=True, sharey="row")
    percent = [100 * rate for rate in settings.rates]
    for row, size in zip(panels, sizes, strict=True):
        for panel, what in zip(row, ("mean", "p99"), strict=True):
            for (name, color), marker in zip(zip(settings.schemes, _COLORS, strict=False), "osD^vx", strict=False):
                found = [
                    getattr(cells[name, Condition(1e6 * size, rate, settings.timeouts[0], settings.bursts[0])], what)
                    for rate in settings.rates
                ]
                panel.plot(
                    percent,
                    [point.value / 1000 for point in found],
                    color=color,
                    marker=marker,
                    markersize=4,
                    label=name,
                )
                panel.fill_between(
                    percent, [point.low / 1000 for point in found], [point.high / 1000 for point in found], color=color, alpha=0.15,
                    linewidth=0,
                )  # fmt: skip
            panel.grid(alpha=0.3)
            panel.set_title(f"{size:g} MB, {'mean' if what == 'mean' else 'P99'}", fontsize=10)
        row[0].set_ylabel("completion time, ms")
        row[0].set_ylim(bottom=0)
    for panel in panels[-1]:
        panel.set_xlabel("packets lost, %")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(settings.schemes))
    figure.savefig(path, format="png")


def draw_gains(settings: Settings, cells: Mapping[tuple[str, Condition], Cell], path: FilePath) -> None:
    """Draw how far our P99 is below the others', the most over all rates, over the size of a message."""
    others = list(settings.paper) or [name for name in settings.schemes if name != settings.ours]
    figure = Figure(figsize=(4.8 * len(others), 4.2), dpi=110, layout="constrained")
    panels = figure.subplots(1, len(others), squeeze=False, sharey=True)[0]
    for panel, name in zip(panels, others, strict=True):
        for color, timeout in zip(_COLORS, settings.timeouts, strict=False):
            for style, burst in zip(("-", "--", ":"), settings.bursts, strict=False):
                best = [
                    max(
                        below(cells[settings.ours, condition], cells[name, condition])
                        for rate in settings.rates
                        for condition in [Condition(1e6 * size, rate, timeout, burst)]
                    )
                    for size in settings.megabytes
                ]
                panel.plot(
                    settings.megabytes, best, style, color=color, marker="o", markersize=3,
                    label=f"RTO {timeout:g}, {_burst(burst)}",
                )  # fmt: skip
        if name in settings.paper:
            panel.axhline(settings.paper[name], color="#444444", linewidth=1, linestyle=(0, (6, 3)))
            panel.annotate(
                "the paper's", (0.98, settings.paper[name]), xycoords=("axes fraction", "data"), ha="right", va="bottom"
            )
        panel.set_xscale("log")
        panel.set_xticks(settings.megabytes, [f"{size:g}" for size in settings.megabytes])
        panel.minorticks_off()
        panel.set_xlabel("message, MB")
        panel.set_title(f"P99 of {settings.ours} below {name} by up to", fontsize=10)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("percent, at the best of the rates")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


if __name__ == "__main__":
    with usage_errors("benchmarks.fct"):
        main()
