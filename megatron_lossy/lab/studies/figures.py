"""Figures of a study: the paper's Figure 1 (all rates in one plot) and Figure 2 (a panel per rate), and
comparisons of variants in their losses or in a recorded scalar. Each as PNG and PDF.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ...base.files import replace_file
from ..report import Run
from ..report.curves import colours, draw_losses, log_axis, loss_axis
from ..report.scalars import axis_of
from .design import Study
from .summary import Results, loss_metrics, mean_and_error, scalar_metric
from .tables import levels_with


def plot_figure_1(results: Results, path: str | Path) -> list[Path]:
    """Draw training loss over iterations at all rates, on a log scale, with validation losses as markers."""
    figure = new_figure(13, 8)
    axes = figure.add_subplot()
    shown = []
    for colour, (label, runs) in zip(colours(len(results.study.levels) + 1), _levels(results), strict=True):
        shown += draw_losses(axes, runs, colour, label, valid=True)
    loss_axis(axes, shown)
    axes.set_xlabel("iteration", fontsize=14)
    axes.set_title(results.study.title, fontsize=17)
    axes.legend(fontsize=13, title=f"{results.study.level_name} (dots: validation)", title_fontsize=13)
    return save_figure(figure, path)


def plot_figure_2(results: Results, path: str | Path) -> list[Path]:
    """Draw a panel per rate: training loss, validation losses, and the training loss without loss in grey."""
    levels = _levels(results)
    columns = min(3, len(levels))
    rows = -(-len(levels) // columns)
    figure = new_figure(5.2 * columns, 4 * rows)
    all_axes = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    shown = []
    for axes, colour, (label, runs) in zip(all_axes, colours(len(results.study.levels) + 1), levels, strict=False):
        if label != results.study.baseline:
            draw_losses(axes, levels[0][1], "0.6", None, valid=False)
        shown += draw_losses(axes, runs, colour, None, valid=True)
        axes.set_title(f"{results.study.level_name} {label}", fontsize=14)
    for axes in all_axes[len(levels) :]:
        axes.remove()
    for axes in all_axes[: len(levels)][-columns:]:  # nothing is below them
        axes.xaxis.set_tick_params(labelbottom=True)
    for axes in figure.axes:
        loss_axis(axes, shown, label=False)
    figure.supxlabel("iteration", fontsize=14)
    figure.supylabel("loss (nats per token, log scale)", fontsize=14)
    figure.suptitle(f"{results.study.title}: line training, dots validation, grey without loss", fontsize=15)
    return save_figure(figure, path)


def plot_comparison(results: Results, metric_name: str, path: str | Path) -> list[Path]:
    """Draw the change of a metric relative to no loss at every level, with standard errors.

    If levels are quantities, there is a line per variant; else points. With one level, there is a point per variant.
    Without levels, the metric itself is drawn.
    """
    study = results.study
    metric = loss_metrics(results.weights)[metric_name]

    def change(variant: str, level: str | None) -> tuple[float, float | None]:
        found = results.by_seed(variant, None, metric) if level is None else results.changes(variant, level, metric)
        return mean_and_error(found.values())

    lines = _lines(study, list(study.levels), change)
    figure, axes = _places(study, list(study.levels))
    for number, (label, changes) in enumerate(lines.items()):
        _points(axes, changes, number, len(lines), label or metric_name, _quantities(study.levels))
    if study.levels:
        axes.axhline(0, color="0.5", linewidth=1)
    shown = f"change of {metric_name}, %" if study.levels else metric_name
    axes.set_ylabel(f"{shown}\n± standard error", fontsize=14)
    if len(lines) > 1:
        axes.legend(fontsize=12)
    return save_figure(figure, path)


def plot_scalar(results: Results, names: Sequence[str], path: str | Path) -> list[Path]:
    """Draw a recorded scalar at every level, with standard errors, and its prediction hollow and dashed.

    ``names``: the scalar, and its prediction if the study has both. If levels are quantities, there is a line per
    variant; else points. With one level, there is a point per variant. Return no file if no run recorded it.
    """
    study = results.study
    levels = levels_with(results, names[0]) if len(study.levels) > 1 else list(study.levels)
    joined = _quantities(study.levels)

    def value(name: str, variant: str, level: str | None) -> tuple[float, float | None]:
        return mean_and_error(results.by_seed(variant, level, scalar_metric(name)).values())

    lines = {name: _lines(study, levels, partial(value, name)) for name in names}
    points = [point for of_name in lines.values() for values in of_name.values() for point in values]
    ends = np.array([mean + sign * (error or 0.0) for mean, error in points for sign in (-1, 1)])
    if not np.isfinite(ends).any():
        return []
    several = len(lines[names[0]]) > 1
    figure, axes = _places(study, levels)
    for name, of_name in lines.items():
        predicted = name != names[0]
        for number, (label, values) in enumerate(of_name.items()):
            text = None if predicted else label if several else name
            _points(axes, values, number, len(of_name), text, joined, predicted)
    axis = axis_of(names[0])
    if axis.logarithmic:
        log_axis(axes, ends)
        low, high = axes.get_ylim()
        axes.set_ylim(low / 1.15, high * 1.15)  # for the markers
        axes.grid(True, axis="y", which="minor", alpha=0.15)
    axes.set_ylabel(f"{axis.label}\n{'log scale, ' if axis.logarithmic else ''}± standard error", fontsize=14)
    if len(names) > 1:
        axes.plot([], [], "o--", color="grey", markerfacecolor="white", markersize=8, linewidth=1, label="predicted")
        figure.set_figheight(figure.get_figheight() + 0.28 * len(axes.get_legend_handles_labels()[0]))
        figure.legend(fontsize=12, loc="outside lower center")
    elif several:
        axes.legend(fontsize=12)
    return save_figure(figure, path)


def _lines(
    study: Study, levels: Sequence[str | None], value: Callable[[str, str | None], tuple[float, float | None]]
) -> dict[str, list[tuple[float, float | None]]]:
    """Return values by line and place: a line per variant over levels; with at most one level, one over variants."""
    if len(study.levels) > 1:
        return {variant: [value(variant, level) for level in levels] for variant in study.variants}
    only = study.levels[0] if study.levels else None
    return {_only_level(study): [value(variant, only) for variant in study.variants]}


def _places(study: Study, levels: Sequence[str | None]) -> tuple[Figure, Axes]:
    """Return a figure whose horizontal axis has the places of :func:`_lines`."""
    several = len(study.levels) > 1
    places = [level or study.baseline for level in levels] if several else study.variants
    figure = new_figure(min(max(8, 1.5 * len(places) + 4), 22), 6.5)
    axes = figure.add_subplot()
    axes.set_xticks(np.arange(len(places)), [place.replace(", ", "\n") for place in places])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_xlabel(study.level_name if several else _only_level(study), fontsize=14)
    axes.set_title(study.title, fontsize=16)
    axes.tick_params(labelsize=12)
    axes.tick_params(axis="x", labelsize=12 if len(places) <= 12 else 9)
    axes.grid(True, axis="y", alpha=0.35)
    return figure, axes


def _quantities(levels: Sequence[str]) -> bool:
    """Return whether ``levels`` are numbers of one kind, so that a line between them has a meaning."""
    kinds = {match and match[1] for match in (re.fullmatch(r"[\d.]+(\D*)", level) for level in levels)}
    return len(levels) > 1 and len(kinds) == 1 and None not in kinds


def _only_level(study: Study) -> str:
    return f"{study.level_name} {study.levels[0] if study.levels else study.baseline}"


def _points(
    axes: Axes,
    values: Sequence[tuple[float, float | None]],
    number: int,
    lines: int,
    label: str | None,
    joined: bool,
    hollow: bool = False,
) -> None:
    """Draw line ``number`` of ``lines`` as points with error bars, shifted a little from those of the others."""
    axes.errorbar(
        np.arange(len(values)) + 0.05 * (number - (lines - 1) / 2),
        [mean for mean, _ in values],
        yerr=[error or 0.0 for _, error in values],
        linestyle=("--" if hollow else "-") if joined else "",
        linewidth=1,
        markersize=8,
        capsize=4,
        label=label,
        **line_style(number),
        **({"markerfacecolor": "white"} if hollow else {}),
    )


def line_style(number: int) -> dict[str, Any]:
    """Return marker and colour of line ``number`` of a figure."""
    return {"marker": "os^Dvphx*+"[number % 10], "color": colormaps["tab10"](number % 10)}


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure, in inches."""
    return Figure(figsize=(width, height), dpi=110, layout="constrained")


def _levels(results: Results) -> list[tuple[str, list[Run]]]:
    """Return the runs of the first variant, by level, without loss first."""
    study, found = results.study, []
    for level in (None, *study.levels):
        trials = results.trials(study.variants[0], level)
        found.append((level or study.baseline, [results.runs[trial.cell.name] for trial in trials]))
    return found


def save_figure(figure: Figure, path: str | Path) -> list[Path]:
    """Write the figure as PNG and PDF; ``path`` is without a suffix."""
    files = {kind: Path(f"{path}.{kind}") for kind in ("png", "pdf")}
    for kind, file in files.items():
        replace_file(file, lambda aside, kind=kind: figure.savefig(aside, format=kind))
    return list(files.values())
