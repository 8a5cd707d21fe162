"""``python -m benchmarks.study_sizes``: what loss costs as models grow, from the reports of one study for each size.

The reports have the same levels and variants, as far as each has them, and models of other sizes. Next to the costs
stand the quantities that decide them by theory, as far as the studies recorded them: learning rate times sharpness over
its stable limit, drift, tokens per parameter.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from megatron_lossy.base.errors import ArgumentParser, UsageError, check_package, refuse, usage_errors
from megatron_lossy.base.files import check_folder, write_text
from megatron_lossy.lab.data import build_tokenizer
from megatron_lossy.lab.launch.memory import parameters
from megatron_lossy.lab.report import LossTable
from megatron_lossy.lab.report.runs import WHOLE
from megatron_lossy.lab.report.table import Entry, ScalarEntry
from megatron_lossy.lab.studies.commands import recorded
from megatron_lossy.lab.studies.figures import line_style, new_figure, save_figure
from megatron_lossy.lab.studies.summary import INTERVAL, Difference, Results, loss_metrics, mean_and_error, trained
from megatron_lossy.lab.studies.tables import SOURCE, paper_entry

STEP, LIMIT, LATE = (f"{name} x sharpness{WHOLE}" for name in ("lr", "largest lr", "lag x lr"))
DRIFT = f"drift over weight{WHOLE}"
_PAPER = 7e9

#: A variant and a level.
Line = tuple[str, str]


@dataclass(frozen=True)
class Size:
    """The report of a study of one model: its number of ``parameters``, and the ``tokens`` of a run."""

    results: Results
    parameters: int
    tokens: int

    @classmethod
    def of(cls, folder: Path) -> Size:
        """Return the report in ``folder``. Raise :class:`UsageError` if its models differ in size, or none loses."""
        results = recorded(folder)
        configs = [trial.cell.train for trial in results.study.trials]
        found = {(parameters(own, build_tokenizer(own.tokenizer).vocab_size), own.tokens) for own in configs}
        if len(found) > 1 or not results.study.levels:
            raise refuse("FOLDER", folder, "must hold a study of loss in models of one size, all for as many tokens")
        return cls(results, *found.pop())

    @property
    def name(self) -> str:
        """The number of parameters in words."""
        number, unit = (self.parameters / 1e6, "M") if self.parameters < 1e9 else (self.parameters / 1e9, "B")
        return f"{float(f'{number:.2g}'):g} {unit}"  # never 1.6e+02

    @property
    def metric(self) -> str:
        """The loss that is compared: of the owners' weights in validation, if these were evaluated."""
        names = [name for name in loss_metrics(self.results.weights) if name.startswith("val loss")]
        return next((name for name in names if name.endswith("(owner)")), names[0])

    def cost(self, line: Line) -> dict[int, float]:
        """Return the change in percent relative to the same seed without loss, by seed."""
        return self.results.changes(*line, loss_metrics(self.results.weights)[self.metric])

    def measured(self, name: str, variant: str, level: str | None) -> dict[int, float]:
        """Return the finite values of the scalar ``name``, by seed."""
        found = self.results.by_seed(variant, level, lambda run: run.scalar(name))
        return {seed: value for seed, value in found.items() if math.isfinite(value)}

    def crossing(self, line: Line) -> dict[int, float]:
        """Return ``lr x sharpness`` without loss, over the largest stable one with the losses of ``line``, by seed."""
        without, limit = self.measured(STEP, line[0], None), self.measured(LIMIT, *line)
        return {seed: without[seed] / limit[seed] for seed in without if limit.get(seed)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the reports, print the tables, and write them and the figures. Raise :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m benchmarks.study_sizes",
        description="The cost of loss against the size of models, from the reports (study.json) of one study for each size.",
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="folder of a report")
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the tables and figures")
    given = parser.parse_args(arguments)
    check_package("matplotlib", "--out", given.out, "matplotlib")
    check_folder("--out", given.out)
    sizes = read(given.folders)
    out = Path(given.out)
    out.mkdir(parents=True, exist_ok=True)
    for name, table in tables(sizes).items():
        print(table.text())
        for suffix, text in (("csv", table.csv()), ("md", table.markdown())):
            write_text(out / f"{name}.{suffix}", text)
    plot_cost(sizes, out / "cost")
    plot_crossing(sizes, out / "crossing")
    print(f"wrote {out}")


def read(folders: Sequence[str | Path]) -> list[Size]:
    """Return the reports in ``folders``, small models first. Raise :class:`UsageError` if two are of one size."""
    sizes = sorted((Size.of(Path(folder)) for folder in folders), key=lambda size: size.parameters)
    for size, larger in itertools.pairwise(sizes):
        if size.parameters == larger.parameters:
            raise UsageError(f"FOLDER: two reports are of models of {size.parameters} parameters")
    return sizes


def lines_of(sizes: Sequence[Size]) -> list[Line]:
    """Return all variants at all levels, level by level."""
    return list(
        dict.fromkeys(
            (variant, level)
            for size in sizes
            for level in size.results.study.levels
            for variant in size.results.study.variants
        )
    )


# --- tables ----------------------------------------------------------------------------------------------------------


def slope(sizes: Sequence[Size], line: Line) -> Difference:
    """Return the growth of the cost (points) with 10 times the parameters: a line for each seed of all sizes."""
    costs = [cost for size in sizes if (cost := size.cost(line))]
    places = [math.log10(size.parameters) for size in sizes if size.cost(line)]
    seeds = set.intersection(*map(set, costs)) if len(costs) > 1 else set()
    return Difference.of(
        {seed: float(np.polyfit(places, [cost[seed] for cost in costs], 1)[0]) for seed in sorted(seeds)}
    )


def tables(sizes: Sequence[Size]) -> dict[str, LossTable]:
    """Return the costs, and the measured quantities, by the names of their files."""
    lines, names = lines_of(sizes), tuple(size.name for size in sizes)
    first = sizes[0].results.study.variants[0]
    costs = [
        (
            _label(line),
            (
                *(Difference.of(size.cost(line)) for size in sizes),
                slope(sizes, line),
                _paper(line[1]) if line[0] == first else Difference.of({}),
            ),
        )
        for line in lines
    ]
    trainings = sorted({origin for size in sizes if (origin := trained(size.results))})
    notes = [
        f"{sizes[0].metric}: change in percent relative to the same seed without loss; {INTERVAL}",
        "per 10 times: points of cost with 10 times the parameters, a straight line for each seed through all sizes of the row",
        SOURCE,
        *(f"{size.name}: {size.parameters:,} parameters, {size.tokens:,} tokens" for size in sizes),
        *(f"trained {origin}" for origin in trainings),
    ]
    missing = {size.name: len(size.results.study.cells) - len(size.results.runs) for size in sizes}
    notes += [f"unfinished: {count} cells of {name} are missing" for name, count in missing.items() if count]
    headings = (*names, "per 10 times", "7 B (paper)")
    return {"cost": LossTable(headings, tuple(costs), tuple(notes)), "measured": _measured(sizes, lines)}


def _measured(sizes: Sequence[Size], lines: Sequence[Line]) -> LossTable:
    rows: list[tuple[str, tuple[Entry, ...]]] = [
        ("tokens per parameter", tuple(ScalarEntry(s.tokens / s.parameters, None, None, 1) for s in sizes))
    ]

    def add(label: str, values: Sequence[dict[int, float]]) -> None:
        if any(values):
            rows.append((label, tuple(ScalarEntry(*mean_and_error(own.values()), None, len(own)) for own in values)))

    add("lr x sharpness, no loss", [size.measured(STEP, size.results.study.variants[0], None) for size in sizes])
    for title, name in (
        ("lr x sharpness", STEP),
        ("lag x lr x sharpness", LATE),
        ("drift over weight", DRIFT),
    ):
        for line in lines:
            values = [size.measured(name, *line) for size in sizes]
            if name != LATE or any(any(own.values()) for own in values):  # nothing lags with a lead
                add(f"{title}, {_label(line)}", values)
    for line in lines:
        add(f"without loss over the largest, {_label(line)}", [size.crossing(line) for size in sizes])
    note = "medians of a run; means over seeds ± standard error; above 1 in the last rows: what loss makes unstable"
    return LossTable(tuple(size.name for size in sizes), tuple(rows), (note,))


def _label(line: Line) -> str:
    variant, level = line
    return f"{level}, {variant}" if variant else level


def _paper(level: str) -> Difference:
    """Return the paper's change of the validation loss at the rate that ``level`` is called by."""
    change = (
        paper_entry("val loss", float(match[1]) / 100).change if (match := re.fullmatch(r"([\d.]+) %", level)) else None
    )
    return Difference.of({} if change is None else {0: change})


# --- figures ---------------------------------------------------------------------------------------------------------


def plot_cost(sizes: Sequence[Size], path: Path) -> list[Path]:
    """Draw costs over the number of parameters with 95 % intervals, a panel for each rate, with the paper's points."""
    panels = _panels(sizes)
    figure = new_figure(6 * len(panels) + 1, 6)
    all_axes = figure.subplots(1, 2 * len(panels), sharey=True, squeeze=False, width_ratios=[6, 1] * len(panels))[0]
    for number, (panel, own) in enumerate(panels.items()):
        axes, beside = all_axes[2 * number : 2 * number + 2]
        for k, line in enumerate(own):
            costs = [Difference.of(size.cost(line)) for size in sizes]
            shift = 1 + 0.05 * (k - (len(own) - 1) / 2)
            axes.errorbar(
                [size.parameters * shift for size in sizes],
                [cost.mean for cost in costs],
                yerr=[cost.half_width or 0.0 for cost in costs],
                **line_style(k),
                linewidth=1.5,
                markersize=8,
                capsize=4,
                label=_panel_name(panel, line),
            )
        axes.set_xscale("log")
        axes.set_xticks([size.parameters for size in sizes], [size.name for size in sizes])
        axes.set_xticks([], minor=True)
        axes.set_xlabel("parameters", fontsize=14)
        axes.set_title(_title(panel), fontsize=15)
        axes.legend(fontsize=12)
        paper = _paper(panel)
        if paper.runs:
            beside.plot([_PAPER], [paper.mean], "k*", markersize=14)
        beside.set_xticks([_PAPER], ["7 B, the paper's\n(other settings)"])
        for part in (axes, beside):
            part.axhline(0, color="0.5", linewidth=1)
            part.grid(True, axis="y", alpha=0.35)
            part.tick_params(labelsize=12)
    all_axes[0].set_ylabel(f"change of {sizes[0].metric}, %\n95 % interval", fontsize=14)
    return save_figure(figure, path)


def plot_crossing(sizes: Sequence[Size], path: Path) -> list[Path]:
    """Draw the costs over ``lr x sharpness`` without loss relative to the largest that loss leaves stable.

    A panel for each rate, with the colours of :func:`plot_cost`, and a marker for each size.
    """
    panels, lines, metric = _panels(sizes), lines_of(sizes), sizes[0].metric
    sizes = [size for size in sizes if any(map(size.crossing, lines))]
    markers = [line_style(number)["marker"] for number in range(len(sizes))]
    figure = new_figure(6 * len(panels) + 1, 6)
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (panel, own) in zip(all_axes, panels.items(), strict=True):
        shown: list[Artist] = []
        for k, line in enumerate(own):
            colour = line_style(k)["color"]
            places = [mean_and_error(size.crossing(line).values())[0] for size in sizes]
            if not any(map(math.isfinite, places)):
                continue
            costs = [Difference.of(size.cost(line)) for size in sizes]
            means, widths = [cost.mean for cost in costs], [cost.half_width or 0.0 for cost in costs]
            axes.errorbar(places, means, widths, fmt="none", ecolor=colour, alpha=0.4, capsize=3)
            for place, mean, marker in zip(places, means, markers, strict=True):
                axes.plot(place, mean, color=colour, marker=marker, markersize=9)
            shown.append(Patch(color=colour, label=_panel_name(panel, line)))
        shown.append(axes.axvline(1, color="0.5", linewidth=1, linestyle="--", label="the limit"))
        axes.axhline(0, color="0.5", linewidth=1)
        axes.set_title(_title(panel), fontsize=15)
        axes.grid(True, alpha=0.35)
        axes.tick_params(labelsize=12)
        axes.legend(handles=shown, fontsize=12)
    all_axes[0].set_xlim(left=0)  # of all, once all have drawn: what is drawn later would not widen it
    figure.supxlabel("learning rate x sharpness without loss, over the largest that is stable with loss", fontsize=13)
    all_axes[0].set_ylabel(f"change of {metric}, %\n95 % interval", fontsize=14)
    grey = {"color": "0.3", "linestyle": "", "markersize": 9}
    figure.legend(
        handles=[
            Line2D([], [], **grey, marker=shape, label=size.name) for shape, size in zip(markers, sizes, strict=True)
        ],
        title="parameters",
        fontsize=12,
        loc="outside right upper",
    )
    return save_figure(figure, path)


def _panels(sizes: Sequence[Size]) -> dict[str, list[Line]]:
    """Return the lines by the rate in the names of their levels. A line's colour is its place in its panel."""
    lines = lines_of(sizes)
    rates = dict.fromkeys(_rate(level) for _, level in lines)
    return {rate: [line for line in lines if _rate(line[1]) == rate] for rate in rates}


def _panel_name(panel: str, line: Line) -> str:
    """Return the name of ``line`` in its panel, which names the rate."""
    variant, level = line
    return variant if level == panel else f"{variant}, {level}"


def _title(panel: str) -> str:
    return f"{panel} lost" if panel.endswith("%") else panel


def _rate(level: str) -> str:
    """Return the rate in the name of a level, which is its panel; all of the name if there is none."""
    match = re.search(r"[\d.]+ %", level)
    return match[0] if match else level


if __name__ == "__main__":
    with usage_errors("benchmarks.study_sizes"):
        main()
