"""Scalars that a study's runs recorded beside their losses: their tables, and their distance from predictions.

A scalar is the value at the end of a run (:meth:`Run.scalar`). Differences are paired by seed, as those of losses are.
They are differences of the values themselves: many scalars, such as drift, do not exist without loss.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..report import LossTable, Run
from ..report.scalars import DEFINITION, file_name
from ..report.table import ScalarEntry
from .summary import INTERVAL, Difference, Results, against_the_first, notes, scalar_metric


def scalar_tables(results: Results, names: Sequence[str]) -> dict[str, LossTable]:
    """All tables of one scalar, by file name. ``names``: the scalar, and its prediction if the study has both."""
    name, *predicted = names
    file, metric = file_name(name), scalar_metric(name)
    note = f"{name}: relative difference in percent, seed by seed; {INTERVAL}"
    tables = {file: _values(results, names)}
    if predicted:
        tables[f"{file}_against_prediction"] = _against(results, name, *predicted)
    between = against_the_first(results.study, name, lambda here, there: results.ratio(here, there, metric), note)
    return tables | {f"{file}_{suffix}": table for suffix, table in between.items()}


def levels_with(results: Results, name: str) -> list[str | None]:
    """The study's levels, after None if runs without loss recorded the scalar too."""
    study = results.study
    without = any(results.by_seed(variant, None, scalar_metric(name)) for variant in study.variants)
    return [None, *study.levels] if without else list(study.levels)


def _values(results: Results, names: Sequence[str]) -> LossTable:
    """The scalars (rows, by variant) at every level (columns)."""
    levels = levels_with(results, names[0])
    rows = [
        (
            (f"{variant}, predicted" if name != names[0] else variant) if variant else name,
            tuple(results.entry(variant, level, scalar_metric(name), ScalarEntry) for level in levels),
        )
        for variant in results.study.variants
        for name in names
    ]
    changes = any(entry.change is not None for _, entries in rows for entry in entries)
    definition = f"values: {', '.join(names)}, {DEFINITION}"
    headings = tuple(level or results.study.baseline for level in levels)
    return LossTable(headings, tuple(rows), tuple(notes(results, definition, changes)))


def _against(results: Results, measured: str, predicted: str) -> LossTable:
    """The percentage by which a scalar is above its prediction in the same runs."""

    def excess(run: Run) -> float | None:
        value, expected = run.scalar(measured), run.scalar(predicted)
        return 100 * (value / expected - 1) if value is not None and expected else None

    study = results.study
    rows = tuple(
        (
            variant or measured,
            tuple(Difference.of(results.by_seed(variant, level, excess)) for level in study.levels),
        )
        for variant in study.variants
    )
    return LossTable(study.levels, rows, (f"{measured} over {predicted} of the same run, in percent; {INTERVAL}",))
