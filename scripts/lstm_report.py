"""What the runs of scripts/lstm_language_model.py say: tables, values and a figure, beside what SMART's section 4.2 says."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lstm_training import ARMS, LOSSLESS
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from megatron_lossy.lab.report import LossTable
from megatron_lossy.lab.report.curves import log_axis
from megatron_lossy.lab.report.table import Entry
from megatron_lossy.lab.studies.summary import INTERVAL, Difference, mean_and_error
from megatron_lossy.lab.train.metrics import perplexity

#: Best validation perplexity in the paper: without loss, and with, by rate.
PAPER_LOSSLESS = 161.37
PAPER = {
    "zero, priority": {0.01: 161.98, 0.02: 162.30, 0.05: 163.15},
    "error feedback, priority": {0.01: 161.59, 0.02: 161.34, 0.05: 161.29},
}
_AGAINST = "zero, priority"
_COLORS = ("#c53030", "#2b6cb0", "#2f855a")
#: What runs gave, by arm, rate (0 without loss), seed and seed of the losses.
Results = Mapping[tuple[str, float, int, int], dict[str, Any]]


def best(found: Mapping[str, Any]) -> float:
    """The best validation perplexity of a run; NaN if it diverged."""
    return math.nan if found["diverged"] is not None else perplexity(min(loss for _, loss in found["valid"]))


def by_seed(results: Results, arm: str, rate: float, value: Callable[[Mapping[str, Any]], float]) -> dict[int, float]:
    """The mean of ``value`` over seeds of the losses, for every seed."""
    found: dict[int, list[float]] = {}
    for (its_arm, its_rate, seed, _), one in results.items():
        if (its_arm, its_rate) == (arm, rate):
            found.setdefault(seed, []).append(value(one))
    return {seed: float(np.mean(values)) for seed, values in found.items()}


def changes(results: Results, arm: str, rate: float) -> dict[int, float]:
    """By how many percent the best perplexity is above that without loss, for every seed."""
    lossless, ours = by_seed(results, LOSSLESS, 0.0, best), by_seed(results, arm, rate, best)
    return {seed: 100 * (ours[seed] / lossless[seed] - 1) for seed in ours}


def paper_change(arm: str, rate: float) -> float:
    """The same in the paper; NaN where it says nothing."""
    return 100 * (PAPER.get(arm, {}).get(rate, math.nan) / PAPER_LOSSLESS - 1)


def tables(results: Results, rates: Sequence[float], made: str) -> dict[str, LossTable]:
    """Perplexities, their changes, the differences of these between arms, and what was lost. ``made``: a note on all."""
    headings = tuple(f"{100 * rate:g} %" for rate in rates)
    seeds, loss_seeds = ({key[place] for key in results if key[0] != LOSSLESS} for place in (2, 3))
    paired = f"in percent, seed by seed; {INTERVAL}"
    plural = "" if len(seeds) == 1 else "s"
    counted = f"{len(seeds)} seed{plural} of weights and data, each with {len(loss_seeds)} of the losses; {made}"

    def table(columns: tuple[str, ...], rows: dict[str, Iterable[Entry]], *notes: str) -> LossTable:
        return LossTable(columns, tuple((name, tuple(entries)) for name, entries in rows.items()), (*notes, counted))

    def paper(value: float) -> Difference:
        return Difference(value, None, None, 0 if math.isnan(value) else 1)

    def entry(arm: str, rate: float) -> Entry:
        values = by_seed(results, arm, rate, best)
        return Entry(*mean_and_error(values), None, len(values), sum(map(math.isnan, values.values())))

    def share(arm: str, rate: float, name: str) -> Entry:
        values = by_seed(results, arm, rate, lambda one: 100 * one[name])
        return Entry(mean_and_error(values)[0], None, None, len(values))

    perplexities: dict[str, Iterable[Entry]] = {LOSSLESS: [entry(LOSSLESS, 0.0)] * len(rates)}
    changed, between, lost = {}, {}, {}
    for arm in ARMS:
        perplexities[arm] = [entry(arm, rate) for rate in rates]
        ours = {rate: changes(results, arm, rate) for rate in rates}
        changed[arm] = map(Difference.of, list(ours.values()))
        for name, text in {"lost": "packets lost for good, %", "missing": "of the sum of |values|, %"}.items():
            lost[f"{arm}: {text}"] = [share(arm, rate, name) for rate in rates]
        if arm in PAPER:
            changed[f"{arm}, paper"] = [paper(paper_change(arm, rate)) for rate in rates]
        if arm == _AGAINST:
            continue
        others = {rate: changes(results, _AGAINST, rate) for rate in rates}
        between[arm] = [Difference.of({k: ours[rate][k] - others[rate][k] for k in ours[rate]}) for rate in rates]
        if arm in PAPER:
            between[f"{arm}, paper"] = [paper(paper_change(arm, rate) - paper_change(_AGAINST, rate)) for rate in rates]
    over = f"best validation perplexity over that without loss, {paired}"
    against = f"against {_AGAINST!r}: difference of the changes of the best validation perplexity, {paired}"
    theirs = "paper: from its perplexities; it gives no seeds and no errors"
    return {
        "perplexity": table(headings, perplexities, "best validation perplexity; ± standard error over seeds"),
        "change": table(headings, changed, over, theirs),
        "difference": table(headings, between, against, theirs),
        "lost": table(headings, lost, "lost for good: with error feedback it is sent again later"),
    }


def values(results: Results) -> str:
    """Every run, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ["train", "diverged", "lost", "high", "missing"]
    writer.writerow(["arm", "rate", "seed", "loss seed", "best PPL", "last PPL", *names])
    for key, found in results.items():
        last = perplexity(found["valid"][-1][1]) if found["valid"] else math.nan
        writer.writerow([*key, best(found), last, *(found.get(name) for name in names)])
    return text.getvalue()


def draw(results: Results, rates: Sequence[float], path: Path) -> None:
    """Changes over the loss rate beside the paper's, and perplexity in the course of training at the largest one."""
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    places = np.arange(len(rates))
    for number, (arm, color) in enumerate(zip(ARMS, _COLORS, strict=True)):
        found = [Difference.of(changes(results, arm, rate)) for rate in rates]
        shift = 0.12 * (number - 1)
        halves = [one.half_width or 0.0 for one in found]
        left.errorbar(places + shift, [one.mean for one in found], halves, fmt="o", color=color, capsize=3, label=arm)
        if arm in PAPER:
            theirs = [paper_change(arm, rate) for rate in rates]
            left.plot(places + shift, theirs, "D", color=color, markerfacecolor="none", label=f"{arm}, paper")
    left.axhline(0, color="#444444", linewidth=1)
    left.set_xticks(places, [f"{100 * rate:g} %" for rate in rates])
    left.set_xlabel("packets lost")
    left.set_ylabel("best validation perplexity, change in %")
    left.set_title("With 95 % intervals", fontsize=10)
    worst = max(rates)
    shown: list[float] = []
    for arm, rate, color in [(LOSSLESS, 0.0, "#444444"), *((a, worst, c) for a, c in zip(ARMS, _COLORS, strict=True))]:
        runs = [one["valid"] for key, one in results.items() if key[:2] == (arm, rate) and one["diverged"] is None]
        if runs:
            curve = np.exp(np.mean([[loss for _, loss in run] for run in runs], axis=0))
            shown += list(curve)
            right.plot([step for step, _ in runs[0]], curve, color=color, marker="o", markersize=3, label=arm)
    log_axis(right, np.array(shown))
    right.set_xlabel("step")
    right.set_ylabel("validation perplexity")
    right.set_title(f"At {100 * worst:g} %, mean over seeds", fontsize=10)
    for panel in (left, right):
        panel.grid(alpha=0.3)
    right.legend(fontsize=9)
    figure.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def origin(results: Results) -> str:
    """When, on what and with which versions the runs were trained."""
    origins = [found["origin"] for found in results.values()]
    dates, machines = (sorted({one[name] for one in origins}) for name in ("date", "hardware"))
    versions = sorted({f"{name} {version}" for one in origins for name, version in one["versions"].items()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"trained {when} on {' and '.join(machines)}, with {', '.join(versions)}"
