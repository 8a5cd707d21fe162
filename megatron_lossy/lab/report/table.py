"""The table of final losses: the layout of Table 1 of *Distributed Training under Packet Loss*.

Rows are training and validation loss and perplexity. There is one column per loss rate, and the change relative to the
column without loss or errors. Several runs of one column give the mean and its standard error.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...base.files import write_text, writing
from ..train.metrics import WHOSE, perplexity
from .columns import Column, baseline, columns, other_differences
from .runs import WEIGHTS, Run

Metric = Callable[[Run], float | None]

ONE_SEED = "one loss seed: differences of a few percent can come from the seed alone; no ordering is claimed"
DEFINITIONS = (
    "train loss: mean over the last 10 % of a run's iterations (at least 10); val loss: last evaluation; "
    "PPL = exp(min(20, loss))"
)


@dataclass(frozen=True)
class Entry:
    """One value: ``mean`` over ``runs`` runs, its standard ``error``, and its ``change`` in percent.

    ``change`` is relative to the clean column, and None if there is nothing to compare with. ``error`` is None for one
    run. ``change_error``: the standard error of ``change`` if the runs are paired with clean ones. ``mean`` is NaN if
    ``diverged`` of the runs have no finite loss; ``runs`` is 0 if none has recorded the value.
    """

    mean: float
    error: float | None
    change: float | None
    runs: int
    diverged: int = 0
    change_error: float | None = None

    def __str__(self) -> str:
        if not self.runs:
            return "-"
        if self.diverged:
            return "diverged" if self.diverged == self.runs else f"diverged in {self.diverged} of {self.runs} runs"
        text = self._number(self.mean)
        if self.error is not None:
            text += f" ± {self._number(self.error, of_error=True)}"
        if self.change is not None:
            style = ".2f" if abs(self.change) < 10000 else ".1e"
            error = f" ± {self.change_error:{style}}" if self.change_error is not None else ""
            text += f" ({self.change:+{style}}{error} %)"
        return text

    def _number(self, value: float, of_error: bool = False) -> str:
        return f"{value:.3f}" if abs(value) < 10000 else f"{value:.3e}"


class ScalarEntry(Entry):
    """An entry of any magnitude: four digits of the mean and two of the error, instead of three decimals."""

    def _number(self, value: float, of_error: bool = False) -> str:
        digits = f"{value:#.2g}" if of_error else f"{value:#.4g}"
        return f"{value:.0f}" if value.is_integer() and abs(value) < 10000 else digits.removesuffix(".")


@dataclass(frozen=True)
class LossTable:
    """Rows of entries, one per column heading, and the notes that belong under them."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    notes: tuple[str, ...]

    def text(self) -> str:
        """Return the table for a terminal: aligned with blanks, ending in a newline."""
        lines = [["metric", *self.headings], *([name, *map(str, entries)] for name, entries in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([*(line.rstrip() for line in padded), "", *self.notes]) + "\n"

    def markdown(self) -> str:
        """Return a Markdown table, then the notes as a list."""
        lines = [["metric", *self.headings], ["---"] * (len(self.headings) + 1)]
        lines += [[name, *map(str, entries)] for name, entries in self.rows]
        table = ["| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in lines]
        return "\n".join([*table, "", *(f"- {note}" for note in self.notes)]) + "\n"

    def csv(self) -> str:
        """Return one line per value, in full precision: metric, loss rate, runs, mean, standard error, change."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        of_change = ["change in percent", "standard error of the change"]
        writer.writerow(["metric", "loss rate", "runs", "diverged runs", "mean", "standard error", *of_change])
        for name, entries in self.rows:
            for heading, entry in zip(self.headings, entries, strict=True):
                mean = "" if math.isnan(entry.mean) else entry.mean
                changes = [entry.change, entry.change_error]
                writer.writerow([name, heading, entry.runs, entry.diverged, mean, entry.error, *changes])
        return stream.getvalue()


def evaluated(runs: Collection[Run]) -> list[str]:
    """Return the kinds of weights that some of ``runs`` were evaluated with."""
    return [kind for kind in WEIGHTS if any(kind in run.valid for run in runs)]


def loss_metrics(weights: Sequence[str]) -> dict[str, Metric]:
    """Return the rows of Table 1: train loss, train PPL, val loss, val PPL (of each kind of ``weights``)."""
    losses: dict[str, Metric] = {"train loss": lambda run: run.train_loss}
    for kind in weights or WEIGHTS[:1]:
        suffix = f" ({kind})" if len(weights) > 1 else ""
        losses[f"val loss{suffix}"] = lambda run, kind=kind: run.valid_loss(kind)
    metrics: dict[str, Metric] = {}
    for name, loss in losses.items():
        metrics[name] = loss
        metrics[name.replace(" loss", " PPL")] = lambda run, loss=loss: perplexity(loss(run))
    return metrics


def mean_and_error(values: Collection[float]) -> tuple[float, float | None]:
    """Return the mean of ``values`` (NaN without any) and its standard error (None below two)."""
    if not values:
        return math.nan, None
    numbers = np.array(list(values))
    error = float(np.std(numbers, ddof=1) / math.sqrt(len(numbers))) if len(numbers) > 1 else None
    return float(np.mean(numbers)), error


def loss_table(runs: Sequence[Run]) -> LossTable:
    """Return the table of ``runs`` (at least one)."""
    groups = columns(runs)
    weights = evaluated(runs)
    rows = [(name, _entries(groups, metric)) for name, metric in loss_metrics(weights).items()]
    return LossTable(tuple(group.label for group in groups), tuple(rows), tuple(_notes(groups, runs, weights)))


def _entries(groups: Sequence[Column], value: Metric) -> tuple[Entry, ...]:
    values = {group.label: [v for v in map(value, group.runs) if v is not None] for group in groups}
    means = {label: mean_and_error(found) for label, found in values.items()}
    entries = []
    for group in groups:
        found, (mean, error) = values[group.label], means[group.label]
        reference = baseline(group, groups)
        change = None
        if reference is not None and not group.clean and (base := means[reference.label][0]):
            change = 100 * (mean / base - 1)
        change = change if change is not None and math.isfinite(change) else None
        error = error if math.isfinite(mean) else None
        entries.append(Entry(mean, error, change, len(found), sum(map(math.isnan, found))))
    return tuple(entries)


def _notes(groups: Sequence[Column], runs: Sequence[Run], weights: Sequence[str]) -> list[str]:
    notes = [DEFINITIONS]
    if weights in (["owner"], ["consensus"]):
        notes.append(f"validation {WHOSE[weights[0]].strip()}")
    lossy = [group for group in groups if not group.clean]
    if not lossy:
        notes.append("no run with loss")
    elif all(baseline(group, groups) is None for group in lossy):
        notes.append("no run without loss: no change can be given")
    else:
        notes.append("in brackets: change relative to 0 %")
    if repeated := [group for group in groups if len(group.runs) > 1]:
        counts = ", ".join(f"{group.label}: {len(group.runs)}" for group in repeated)
        notes.append(f"mean ± standard error over runs ({counts})")
    if single := [group for group in lossy if group.repetitions == 1]:
        which = "" if len(single) == len(lossy) else "; ".join(group.label for group in single) + ": "
        notes.append(which + ONE_SEED)
    for group in repeated:
        if group.repetitions < len(group.runs):
            how = f"{len(group.runs)} runs with {group.repetitions} different seeds"
            why = "runs with equal seeds are not independent, the standard error is too small"
            notes.append(f"{group.label}: {how}; {why}")
    evaluated = {run.name: max((i for losses in run.valid.values() for i in losses), default=0) for run in runs}
    for what, last in (("not trained to", {run.name: run.iterations for run in runs}), ("not evaluated at", evaluated)):
        longest = max(last.values())
        if short := [f"{name} (last {iteration})" for name, iteration in last.items() if iteration < longest]:
            notes.append(f"{what} iteration {longest}: " + ", ".join(short))
    if different := other_differences(runs):
        notes.append("runs differ in more than the loss: " + ", ".join(key.replace("_", "-") for key in different))
    return notes


FILES = TABLE_MARKDOWN, TABLE_CSV, CURVES = "loss_table.md", "loss_table.csv", "training_curves.png"


def write_report(runs: Sequence[Run], table: LossTable, folder: str | Path) -> list[Path]:
    """Write table and curves of ``runs`` to ``folder``, replacing an older report. Return the files."""
    from .curves import plot_curves

    folder = Path(folder)
    with writing("--out", folder):
        folder.mkdir(parents=True, exist_ok=True)
        # The largest file goes first: if it does not fit, the older report is still complete.
        plot_curves(runs, folder / CURVES)
        write_text(folder / TABLE_MARKDOWN, table.markdown())
        write_text(folder / TABLE_CSV, table.csv())
    return [folder / name for name in FILES]
