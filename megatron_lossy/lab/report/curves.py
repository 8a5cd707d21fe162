"""Curves over iterations, one colour per loss rate: the losses of training, and any recorded scalar."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, ticker
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ...base.files import replace_file
from .columns import columns
from .runs import LOSS, WEIGHTS, Run
from .scalars import PREDICTED, axis_of

# Owners are small and drawn last: their losses are close to those of the replicas.
_MARKERS = {
    "replica": {"marker": "o", "markersize": 10, "linestyle": ""},
    "owner": {"marker": "D", "markersize": 6, "linestyle": ""},
    "consensus": {"marker": "s", "markersize": 7, "linestyle": ""},
}


def plot_curves(runs: Sequence[Run], names: Sequence[str], path: str | Path) -> None:
    """Draw recorded scalars that have one axis, of all ``runs`` that have them, to the PNG ``path``, 1600 x 1000 pixels.

    Faint: as recorded; lines: the running mean, dashed for a name that is a prediction of another. With the training loss
    there are markers, validation, and a cross at the last finite loss of a run that diverged. Runs of one column share a
    colour.
    """
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    axes, groups, axis, losses = figure.add_subplot(), columns(runs), axis_of(names[0]), names[0] == LOSS
    legend, lines = [], [np.zeros(0)]
    # The bright end of viridis is illegible on white.
    colours = colormaps["viridis"](np.linspace(0, 0.88, max(len(groups), 2)))
    for colour, group in zip(colours, groups, strict=False):
        drawn = [(name, run.recorded(name)) for run in group.runs for name in names if run.recorded(name)]
        for name, values in drawn:
            iterations, recorded = _series(values)
            lines.append(smooth := running_mean(recorded))
            predicted = name.endswith(PREDICTED)
            if not predicted:
                axes.plot(iterations, recorded, color=colour, alpha=0.25, linewidth=1)
            axes.plot(iterations, smooth, color=colour, linewidth=2.2, linestyle="--" if predicted else "-")
            finite = np.flatnonzero(np.isfinite(recorded))
            if losses and len(finite) < len(recorded):
                axes.plot(iterations[finite[-1:]], recorded[finite[-1:]], "X", color=colour, markersize=14)
        for run, kind in itertools.product(group.runs if losses else (), WEIGHTS):
            iterations, valid = _series(run.valid.get(kind, {}))
            lines.append(valid)
            axes.plot(iterations, valid, color=colour, markeredgecolor="white", zorder=3, **_MARKERS[kind])
        if drawn or (losses and any(run.valid for run in group.runs)):
            label = group.label + (f" ({len(group.runs)} runs)" if len(group.runs) > 1 else "")
            if losses and not all(math.isfinite(value) for _, values in drawn for value in values.values()):
                label += ", diverged"
            legend.append(Line2D([], [], color=colour, linewidth=4, label=label))
    title = "Language-model loss at each rate of lost communication" if losses else names[0][0].upper() + names[0][1:]
    axes.set_title(title, fontsize=20)
    axes.set_xlabel("iteration", fontsize=17)
    axes.xaxis.set_major_locator(ticker.MaxNLocator(9, integer=True))
    axes.tick_params(labelsize=15)
    axes.grid(True, which="major", alpha=0.35)
    axes.set_ylabel(axis.label + (", log scale" if axis.logarithmic else ""), fontsize=17)
    if axis.logarithmic:
        log_axis(axes, np.concatenate(lines))
    kinds = [kind for kind in WEIGHTS if losses and any(kind in run.valid for run in runs)]
    for kind in kinds:
        name = f"validation ({kind})" if len(kinds) > 1 else "validation"
        legend.append(Line2D([], [], color="grey", label=name, **_MARKERS[kind]))
    what = "training" if losses else names[0]
    legend.append(Line2D([], [], color="grey", linewidth=2.2, label=f"{what}, running mean"))
    legend.append(Line2D([], [], color="grey", alpha=0.4, linewidth=1, label=f"{what}, as recorded"))
    for name in names[1:]:
        legend.append(Line2D([], [], color="grey", linewidth=2.2, linestyle="--", label=f"{name}, running mean"))
    axes.legend(handles=legend, fontsize=15, title="loss rate", title_fontsize=15)
    replace_file(path, lambda aside: figure.savefig(aside, format=Path(path).suffix[1:]))


def running_mean(values: np.ndarray) -> np.ndarray:
    """Return mean over 1/40 of the values on either side. NaN counts nowhere and stays NaN.

    Near the start losses fall steeply: there both sides are cut alike, which shifts nothing. At the flat end only the
    missing side is cut, which keeps the last values smooth.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(index, len(values) // 40)
    low, high = index - half, np.minimum(index + half + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(finite, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _series(values: Mapping[int, float]) -> tuple[np.ndarray, np.ndarray]:
    """Return iterations in order, and their values."""
    iterations = np.array(sorted(values), dtype=np.int64)
    return iterations, np.array([values[i] for i in iterations.tolist()], dtype=np.float64)


def log_axis(axes, values: np.ndarray) -> None:
    """Make the vertical axis logarithmic, around the finite ones of ``values``, with readable ticks."""
    axes.set_yscale("log")
    values = values[np.isfinite(values) & (values > 0)]
    if not len(values):
        return
    low, high = values.min(), values.max()
    axes.set_ylim(low / 1.05, high * 1.05)
    if high / low < 30:  # a decade has too few ticks for most curves
        axes.yaxis.set_major_locator(ticker.MaxNLocator(nbins=12, steps=[1, 2, 2.5, 5, 10]))
        axes.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axes.yaxis.set_minor_formatter(ticker.NullFormatter())
