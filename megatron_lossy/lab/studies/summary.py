"""The results of a study: means over seeds, and changes relative to runs without loss from the same seeds.

A seed (of weights and data) is the unit of repetition. Runs of one seed with several loss seeds are averaged first. The
standard error is that of the mean over seeds, and so covers both. Changes are paired: each seed's loss is compared with
the loss of the same seed's run without loss.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..report import LossTable, Run
from ..report.table import DEFINITIONS, Entry, Metric, evaluated, loss_metrics, mean_and_error
from .design import NO_ERROR, NO_LOSS, Study, Trial

Place = tuple[str, str | None]
INTERVAL = "± standard error (95 % interval, Student's t)"
#: The columns of :func:`run_table` before the losses: the run's place in the study.
RUN_COLUMNS = ("cell", "variant", "level", "seed", "loss seed")

# The 97.5 % quantile of Student's t by degrees of freedom; from 20 on it is within 0.13 of the normal law's 1.96.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_T += (2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093)


@dataclass(frozen=True)
class Difference(Entry):
    """A difference in percent, or in percentage points. It is printed with its sign, standard error and 95 % interval.

    ``diverged``: number of seeds with a diverged run on either side.
    """

    @classmethod
    def of(cls, by_seed: Mapping[int, float]) -> Difference:
        """Return the mean over seeds."""
        mean, error = mean_and_error(by_seed.values())
        return cls(mean, error, None, len(by_seed), sum(map(math.isnan, by_seed.values())))

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % interval (Student's t); ``None`` below two seeds."""
        return None if self.error is None else _T[min(self.runs - 2, len(_T) - 1)] * self.error

    def __str__(self) -> str:
        if not self.runs or math.isnan(self.mean):
            return "diverged" if self.diverged else "-"
        if (half := self.half_width) is None:
            return f"{self.mean:+.2f}"
        places = 1 if half >= 0.1 else 3
        interval = f"{self.mean - half:+.{places}f} to {self.mean + half:+.{places}f}"
        return f"{self.mean:+.{places + 1}f} ± {self.error:.{places + 1}f} ({interval})"


@dataclass(frozen=True)
class Results:
    """A study and its finished runs, by the cells' names."""

    study: Study
    runs: Mapping[str, Run]

    def trials(self, variant: str, level: str | None) -> list[Trial]:
        """Return the finished trials of one place in the table; ``level`` None is without loss."""
        return [
            trial
            for trial in self.study.trials
            if (trial.variant, trial.level) == (variant, level) and trial.cell.name in self.runs
        ]

    def by_seed(self, variant: str, level: str | None, metric: Metric) -> dict[int, float]:
        """Return the mean of ``metric`` over loss seeds, for every seed; NaN if one of them diverged."""
        values: dict[int, list[float]] = {}
        for trial in self.trials(variant, level):
            if (value := metric(self.runs[trial.cell.name])) is not None:
                values.setdefault(trial.seed, []).append(value)
        return {seed: float(np.mean(v)) for seed, v in values.items()}

    def changes(self, variant: str, level: str, metric: Metric) -> dict[int, float]:
        """Return the change in percent relative to no loss, for every seed that has both."""
        reference = self.by_seed(variant, None, metric)
        own = self.by_seed(variant, level, metric)
        return {seed: 100 * (own[seed] / reference[seed] - 1) for seed in own if reference.get(seed)}

    def entry(self, variant: str, level: str | None, metric: Metric, kind: type[Entry] = Entry) -> Entry:
        """Return mean, standard error and change of ``metric``."""
        found = [metric(self.runs[trial.cell.name]) for trial in self.trials(variant, level)]
        found = [value for value in found if value is not None]
        diverged = sum(map(math.isnan, found))
        if not found or diverged:
            return kind(math.nan, None, None, len(found), diverged)
        mean, error = mean_and_error(self.by_seed(variant, level, metric).values())
        change = change_error = None
        if level is not None:
            change, change_error = mean_and_error(self.changes(variant, level, metric).values())
        if change is not None and math.isnan(change):
            change = change_error = None
        return kind(mean, error, change, len(found), 0, change_error)

    def difference(self, here: Place, there: Place, metric: Metric) -> Difference:
        """Return the change at ``here`` minus the change at ``there``, both (variant, level), seed by seed."""
        ours, theirs = (self.changes(variant, level, metric) for variant, level in (here, there))
        return Difference.of({seed: ours[seed] - theirs[seed] for seed in ours if seed in theirs})

    def ratio(self, here: Place, there: Place, metric: Metric) -> Difference:
        """Return the percentage by which ``metric`` is larger ``here`` than ``there``, (variant, level), by seed."""
        ours, theirs = (self.by_seed(variant, level, metric) for variant, level in (here, there))
        return Difference.of({seed: 100 * (ours[seed] / theirs[seed] - 1) for seed in ours if theirs.get(seed)})

    @property
    def weights(self) -> list[str]:
        """The kinds of weights that were evaluated."""
        return evaluated(self.runs.values())


def scalar_metric(name: str) -> Metric:
    """Return the recorded scalar ``name`` at the end of a run."""
    return lambda run: run.scalar(name)


def comparison(results: Results, metric_name: str) -> LossTable:
    """Return one metric of every variant (rows) at every level (columns)."""
    metric = loss_metrics(results.weights)[metric_name]
    levels: list[str | None] = [None, *results.study.levels]
    rows = _rows(results.study, levels, lambda variant, level: results.entry(variant, level, metric), metric_name)
    return LossTable((results.study.baseline, *results.study.levels), rows, (f"values: {metric_name}", *notes(results)))


def _rows(
    study: Study, levels: Sequence[str | None], value: Callable[[str, str | None], Entry], label: str = ""
) -> tuple[tuple[str, tuple[Entry, ...]], ...]:
    """Return ``value`` of every variant (rows) at ``levels`` (columns). ``label``: of a variant without a name."""
    return tuple((variant or label, tuple(value(variant, level) for level in levels)) for variant in study.variants)


def differences(results: Results, metric_name: str) -> dict[str, LossTable]:
    """Return tables by name: changes of variants minus the first's or a partner's, of levels minus the first's."""
    study, metric, tables = results.study, loss_metrics(results.weights)[metric_name], {}
    if not study.levels:
        return tables
    note = f"{metric_name}: difference of the changes, in percentage points, seed by seed; {INTERVAL}"
    first, *others = study.variants
    if others:
        rows = []
        for name in others:
            other = study.against.get(name, first)
            own = tuple(results.difference((name, level), (other, level), metric) for level in study.levels)
            rows.append((f"{name}, against {other}" if other != first else name, own))
        tables["between_variants"] = LossTable(study.levels, tuple(rows), (f"against {first!r}; {note}",))
    first_level, *more = study.levels
    if more:
        rows = []
        for name in study.variants:
            own = tuple(results.difference((name, level), (name, first_level), metric) for level in more)
            rows.append((name or metric_name, own))
        tables["between_levels"] = LossTable(tuple(more), tuple(rows), (f"against {first_level!r}; {note}",))
    return tables


def against_best(results: Results, metric_name: str) -> LossTable | None:
    """Return the percentage by which a metric is above that of the best variant without loss, seed by seed.

    None if all variants share their runs without loss: the changes relative to those are the same.
    """
    study, metric = results.study, loss_metrics(results.weights)[metric_name]
    lossless = {
        variant: mean
        for variant in study.variants
        if math.isfinite(mean := mean_and_error(results.by_seed(variant, None, metric).values())[0])
    }
    cells, seeds = {trial.cell.name for trial in study.trials if trial.level is None}, {t.seed for t in study.trials}
    if not lossless or len(cells) == len(seeds):
        return None
    best = min(lossless, key=lossless.__getitem__)
    levels: list[str | None] = [None, *study.levels]
    rows = _rows(study, levels, lambda variant, level: results.ratio((variant, level), (best, None), metric))
    without = "errors" if study.errs else "loss"
    note = f"{metric_name} over that of {best!r} without {without}, the lowest mean of this table, in percent, seed by seed"
    return LossTable((study.baseline, *study.levels), rows, (f"{note}; {INTERVAL}",))


def replica_against_owner(results: Results) -> LossTable | None:
    """Return the percentage by which the replicas' last validation loss is above the owners'."""
    kinds = ["replica", "owner"]
    if results.weights != kinds or not results.study.levels:
        return None

    note = "last validation loss with the workers' replicas over that with the owners' weights"
    return excesses(results, "val loss", lambda run: tuple(run.valid_loss(kind) for kind in kinds), note)


def excesses(results: Results, label: str, pair: Callable[[Run], tuple[float | None, ...]], note: str) -> LossTable:
    """Return the percentage by which the first of a ``pair`` of values is above the second, in the same runs."""

    def excess(run: Run) -> float | None:
        value, reference = pair(run)
        return 100 * (value / reference - 1) if value is not None and reference is not None else None

    study, levels = results.study, results.study.levels
    rows = _rows(study, levels, lambda variant, level: Difference.of(results.by_seed(variant, level, excess)), label)
    return LossTable(levels, rows, (f"{note}, in percent; {INTERVAL}",))


def run_table(results: Results) -> str:
    """Return all finished runs as CSV: their place in the study, their losses and the study's metrics."""
    metrics = {name: metric for name, metric in loss_metrics(results.weights).items() if "PPL" not in name}
    metrics |= {name: scalar_metric(name) for name in results.study.metrics}
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow([*RUN_COLUMNS, *metrics])
    for trial in results.study.trials:
        if run := results.runs.get(trial.cell.name):
            seeds = [trial.seed, trial.cell.loss.loss_seed if trial.level else ""]
            losses = [metric(run) for metric in metrics.values()]
            writer.writerow([trial.cell.name, trial.variant, trial.level or results.study.baseline, *seeds, *losses])
    return stream.getvalue()


def notes(results: Results, definitions: str = DEFINITIONS, changes: bool = True) -> list[str]:
    """Return notes for the end of a table: definitions of rows, seeds, training. ``changes``: it has brackets."""
    study = results.study
    seeds = len({trial.seed for trial in study.trials})
    loss_seeds = len({trial.loss_seed for trial in study.trials} - {None})
    errors = "± standard error of the mean over seeds" if seeds > 1 else "one seed: no error can be given"
    what = "errors" if study.errs else "losses"
    losses = f", each with {loss_seeds} {'seeds' if loss_seeds > 1 else 'seed'} of the {what}"
    reference = {NO_LOSS: "without loss", NO_ERROR: "without errors"}.get(study.baseline, f"with {study.baseline}")
    brackets = f"; in brackets: change relative to the same seed {reference}" if changes else ""
    more = f"{losses}; {errors}{brackets}" if study.levels else f"; {errors}"
    result = [definitions, f"{seeds} {'seeds' if seeds > 1 else 'seed'} of weights and data{more}"]
    if origin := trained(results):
        result.append(f"trained {origin}")
    if missing := [cell for cell in study.cells if cell.name not in results.runs]:
        result.append(f"unfinished: {len(missing)} of {len(study.cells)} cells are missing")
    return result


def trained(results: Results) -> str:
    """Return date, hardware and versions of the training; empty if no run recorded them."""
    origins = [run.origin for run in results.runs.values()]
    recorded = sorted({part for origin in origins for part in origin.get("trained", "").split("; ") if part})
    if not (dates := sorted({origin["date"] for origin in origins if "date" in origin})):
        return "; ".join(recorded)
    hardware = sorted({origin["hardware"] for origin in origins if "hardware" in origin})
    versions = sorted({f"{name} {v}" for origin in origins for name, v in origin.get("versions", {}).items()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return "; ".join([*recorded, f"{when} on {' and '.join(hardware)}, with {', '.join(versions)}"])
