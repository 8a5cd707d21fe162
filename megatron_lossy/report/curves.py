"""Training curves: loss over iterations on a logarithmic scale, one colour per loss rate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, ticker
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ..files import replace_file
from .columns import columns
from .runs import WEIGHTS, Run

# Owners are small and drawn last: their losses are close to those of the replicas.
_MARKERS = {
    "replica": {"marker": "o", "markersize": 10, "linestyle": ""},
    "owner": {"marker": "D", "markersize": 6, "linestyle": ""},
}


def plot_curves(runs: Sequence[Run], path: str | Path) -> None:
    """Draw ``runs`` (at least one) to the PNG ``path``, 1600 x 1000 pixels.

    Faint: the recorded training losses; lines: their running mean; markers: validation. Runs of one column share
    a colour. A cross marks the last finite loss of a run that diverged.
    """
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    groups = columns(runs)
    # The bright end of viridis is illegible on white.
    colours = colormaps["viridis"](np.linspace(0, 0.88, max(len(groups), 2)))
    legend = []
    lines = []
    for colour, group in zip(colours, groups, strict=False):
        diverged = False
        for run in group.runs:
            iterations = np.array(sorted(run.train), dtype=np.int64)
            losses = np.array([run.train[i] for i in iterations.tolist()], dtype=np.float64)
            smooth = running_mean(losses)
            axes.plot(iterations, losses, color=colour, alpha=0.25, linewidth=1)
            axes.plot(iterations, smooth, color=colour, linewidth=2.2)
            lines.append(smooth)
            finite = np.flatnonzero(np.isfinite(losses))
            if len(finite) < len(losses):
                diverged = True
                axes.plot(iterations[finite[-1:]], losses[finite[-1:]], "X", color=colour, markersize=14)
            for weights in WEIGHTS:
                valid = sorted(run.valid.get(weights, {}).items())
                lines.append(np.array([loss for _, loss in valid]))
                axes.plot(
                    *(zip(*valid, strict=True) if valid else ((), ())),
                    color=colour,
                    markeredgecolor="white",
                    zorder=3,
                    **_MARKERS[weights],
                )
        count = f" ({len(group.runs)} runs)" if len(group.runs) > 1 else ""
        label = group.label + count + (", diverged" if diverged else "")
        legend.append(Line2D([], [], color=colour, linewidth=4, label=label))
    _label(axes, np.concatenate(lines))
    kinds = [weights for weights in WEIGHTS if any(weights in run.valid for run in runs)]
    for weights in kinds:
        name = f"validation ({weights})" if len(kinds) > 1 else "validation"
        legend.append(Line2D([], [], color="grey", label=name, **_MARKERS[weights]))
    legend.append(Line2D([], [], color="grey", linewidth=2.2, label="training, running mean"))
    legend.append(Line2D([], [], color="grey", alpha=0.4, linewidth=1, label="training, as recorded"))
    axes.legend(handles=legend, fontsize=15, title="loss rate", title_fontsize=15)
    replace_file(path, lambda aside: figure.savefig(aside, format=Path(path).suffix[1:]))


def running_mean(values: np.ndarray) -> np.ndarray:
    """Mean over 1/40 of the values on either side. NaN counts nowhere and stays NaN.

    Near the start, where losses fall steeply, both sides are cut alike, which shifts nothing; at the flat end
    only the missing one is, which keeps the last values smooth.
    """
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    index = np.arange(len(values))
    half = np.minimum(index, len(values) // 40)
    low, high = index - half, np.minimum(index + half + 1, len(values))
    number = counts[high] - counts[low]
    return np.where(finite, (sums[high] - sums[low]) / np.maximum(number, 1), np.nan)


def _label(axes, values: np.ndarray) -> None:
    axes.set_title("Language-model loss at each rate of lost communication", fontsize=20)
    axes.set_xlabel("iteration", fontsize=17)
    axes.set_ylabel("language-model loss (nats per token, log scale)", fontsize=17)
    axes.tick_params(labelsize=15)
    axes.grid(True, which="major", alpha=0.35)
    log_axis(axes, values)


def log_axis(axes, values: np.ndarray) -> None:
    """Make the loss axis logarithmic, around the finite ones of ``values``, with ticks that can be read."""
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
