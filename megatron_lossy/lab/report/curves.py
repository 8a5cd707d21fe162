"""Curves of the losses over iterations, one colour per loss rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps, ticker
from matplotlib.figure import Figure

from ...base.files import replace_file
from .columns import columns
from .runs import WEIGHTS, Run


def plot_curves(runs: Sequence[Run], path: str | Path) -> None:
    """Draw the losses of ``runs`` to the PNG ``path``, 1600 x 1000 pixels. Runs of one column share a colour."""
    figure = Figure(figsize=(16, 10), dpi=100, layout="constrained")
    axes, groups, shown = figure.add_subplot(), columns(runs), list[float]()
    for colour, group in zip(colours(len(groups)), groups, strict=True):
        label = group.label + (f" ({len(group.runs)} runs)" if len(group.runs) > 1 else "")
        label += ", diverged" if any(math.isnan(loss) for run in group.runs for loss in run.train.values()) else ""
        shown += draw_losses(axes, group.runs, colour, label, valid=True)
    loss_axis(axes, shown)
    axes.set_title("Language-model loss at each rate of lost communication", fontsize=20)
    axes.set_xlabel("iteration", fontsize=14)
    axes.legend(fontsize=13, title="loss rate (dots: validation)", title_fontsize=13)
    replace_file(path, lambda aside: figure.savefig(aside, format=Path(path).suffix[1:]))


def colours(number: int) -> np.ndarray:
    """Return ``number`` colours, float[number, 4]."""
    # The bright end of viridis is illegible on white.
    return colormaps["viridis"](np.linspace(0, 0.88, number))


def draw_losses(axes, runs: Sequence[Run], colour, label: str | None, valid: bool) -> list[float]:
    """Draw the mean of ``runs`` with a band from least to most, and validation losses. Return the drawn values."""
    if not runs:
        return []
    iterations = sorted(set.intersection(*(set(run.train) for run in runs)))
    losses = np.array([running_mean(np.array([run.train[i] for i in iterations])) for run in runs])
    mean = losses.mean(axis=0)
    axes.plot(iterations, mean, color=colour, linewidth=2, label=label)
    if len(runs) > 1:
        axes.fill_between(iterations, losses.min(axis=0), losses.max(axis=0), color=colour, alpha=0.18, linewidth=0)
    shown = list(mean)
    if valid and (kind := next((kind for kind in WEIGHTS if all(kind in run.valid for run in runs)), None)):
        points = sorted(set.intersection(*(set(run.valid[kind]) for run in runs)))
        means = [float(np.mean([run.valid[kind][i] for run in runs])) for i in points]
        axes.plot(points, means, "o", color=colour, markeredgecolor="white", markersize=8, zorder=3)
        shown += means
    return shown


def loss_axis(axes, shown: Sequence[float], label: bool = True) -> None:
    """Make the vertical axis logarithmic, for the losses ``shown``."""
    log_axis(axes, np.array(shown))
    axes.grid(True, which="major", alpha=0.35)
    axes.tick_params(labelsize=12)
    if label:
        axes.set_ylabel("loss (nats per token, log scale)", fontsize=14)


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
    return np.where(finite, (sums[high] - sums[low]) / np.maximum(counts[high] - counts[low], 1), np.nan)


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
