"""The picture of a run with islands that come and go: losses, and below them the presence of islands."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from benchmarks.churn.results import ALONE, LISTENS, SENDS, Results
from benchmarks.churn.schedule import COORDINATOR

_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#8c564b", "#e377c2", "#17becf")
_STATES = {SENDS: "#3a9d5d", LISTENS: "#f2c14e", ALONE: "#b9c3cf"}
_SYMBOLS = {
    "stop": ("X", "#b2182b"),
    "freeze": ("s", "#2166ac"),
    "cut": ("D", "#7b3294"),
    "return": (">", "#1a1a1a"),
    "join": ("P", "#1a1a1a"),
}
_NAMES = {"stop": "killed", "freeze": "frozen", "cut": "cut off", "return": "there again", "join": "new"}
#: Training losses are means over so many iterations, and over more of a long run.
_SMOOTH = 15
#: Of more events than these the marks are small, and there are no lines.
_FEW = 60


def picture(results: Results, title: str, path: Path) -> None:
    """Write the picture to ``path``."""
    figure = Figure(figsize=(12, 7.6), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    rows = len(results.islands) + 1
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2.2, 0.32 * rows + 0.1))
    figure.suptitle(title, fontsize=12)
    _losses(top, results)
    _membership(bottom, results)
    for event in results.happened if _few(results) else ():
        for axes in (top, bottom):
            axes.axvline(event.at, color=_SYMBOLS[event.event][1], linewidth=0.7, alpha=0.35, zorder=0)
    top.set_xlim(0, results.end)
    figure.savefig(path, format="png")


def _few(results: Results) -> bool:
    return len(results.happened) <= _FEW


def _losses(axes: Axes, results: Results) -> None:
    seen, window = [], max(_SMOOTH, results.end // 150)
    for island, colour in zip(results.islands, _COLOURS):
        for life in island.lives:
            numbers = np.array([record["iteration"] for record in life.trained], dtype=float)
            losses = np.array([record["lm loss"] for record in life.trained], dtype=float)
            if not len(numbers):
                continue
            gaps = np.flatnonzero(np.diff(numbers) > 1) + 1
            for x, y in zip(np.split(numbers, gaps), np.split(losses, gaps)):
                kernel = np.ones(min(window, len(y)))
                smooth = np.convolve(y, kernel, "same") / np.convolve(np.ones(len(y)), kernel, "same")
                axes.plot(x, smooth, color=colour, alpha=0.45, linewidth=1.1)
                seen.append(smooth)
        valid = sorted(island.valid.items())
        axes.plot(
            *zip(*valid) if valid else ([], []),
            "o",
            color=colour,
            markersize=6,
            label=f"island {island.slot}",
            markeredgecolor="white",
        )
    every = np.concatenate(seen) if seen else np.ones(1)
    axes.set_ylim(0.97 * every.min(), min(every.max(), float(np.quantile(every, 0.97)) * 1.15))
    axes.set_ylabel("language-model loss (nats per token)")
    axes.set_title(f"Lines: training, mean of {window} iterations; dots: validation", fontsize=10)
    axes.grid(True, alpha=0.3)
    axes.legend(ncols=len(results.islands), loc="upper right")


def _membership(axes: Axes, results: Results) -> None:
    places = {island.slot: place for place, island in enumerate(results.islands)} | {COORDINATOR: len(results.islands)}
    for island in results.islands:
        for first, last, state in island.spans:
            axes.barh(places[island.slot], last - first, left=first, height=0.62, color=_STATES[state], linewidth=0)
    for first, last in _served(results):
        axes.barh(places[COORDINATOR], last - first, left=first, height=0.3, color="#5b6673", linewidth=0)
    size, edge = (9.0, "white") if _few(results) else (4.0, "none")
    for event in results.happened:
        marker, colour = _SYMBOLS[event.event]
        axes.plot(event.at, places[event.slot], marker, color=colour, markersize=size, markeredgecolor=edge, zorder=5)
    axes.set_yticks(list(places.values()), [f"island {slot}" if slot >= 0 else "coordinator" for slot in places])
    axes.invert_yaxis()
    axes.set_xlabel("iteration of the run")
    axes.grid(True, axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    bars: list = [Patch(color=colour, label=state) for state, colour in _STATES.items()]
    there = dict.fromkeys(event.event for event in results.happened)
    marks = [
        axes.plot(
            [], [], _SYMBOLS[event][0], color=_SYMBOLS[event][1], markersize=8, linestyle="none", label=_NAMES[event]
        )[0]
        for event in there
    ]
    axes.legend(
        handles=[*bars, *marks],
        loc="upper center",
        bbox_to_anchor=(0.5, -0.2),
        ncols=len(bars) + len(marks),
        fontsize=9,
    )


def _served(results: Results) -> list[tuple[int, int]]:
    """Return the iterations in which the coordinator was there."""
    edges = [0, *(event.at for event in results.happened if event.slot == COORDINATOR)]
    edges += [results.end] if len(edges) % 2 else []
    return list(zip(edges[::2], edges[1::2]))
