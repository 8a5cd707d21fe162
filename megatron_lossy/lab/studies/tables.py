"""Tables of a study beyond those of :mod:`.summary`: Table 1, recorded scalars, and the share of a cost that is won back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from ..report import LossTable
from ..report.runs import WHOLE
from ..report.scalars import DEFINITION, DEFINITION_WHOLE, file_name
from ..report.table import Entry, ScalarEntry
from .summary import INTERVAL, Difference, Results, excesses, loss_metrics, notes, scalar_metric

# --- Table 1 of the paper ---------------------------------------------------------------------------------------------
# *Distributed Training under Packet Loss* (Weintraub, Banner, Orda, 2025), next to ours: LLaMA-2 7B, 64 accelerators,
# 5,000 iterations, gradients and parameters lost at equal rates.


PAPER_RATES = (0.0, 0.1, 0.2, 0.3, 0.4)
SOURCE = "paper: Weintraub, Banner, Orda (2025), Table 1: LLaMA-2 7B, 64 workers, 5,000 iterations"
PAPER_TABLE_1 = {
    "train loss": (1.645, 1.653, 1.672, 1.684, 1.710),
    "train PPL": (5.183, 5.223, 5.325, 5.388, 5.531),
    "val loss": (2.366, 2.378, 2.392, 2.403, 2.430),
    "val PPL": (10.653, 10.778, 10.934, 11.055, 11.362),
}
# Changes are as printed; they were computed from more digits than the table shows.
PAPER_CHANGES = {
    "train loss": (0.47, 1.63, 2.36, 3.95),
    "train PPL": (0.77, 2.72, 3.95, 6.71),
    "val loss": (0.49, 1.10, 1.56, 2.72),
    "val PPL": (1.17, 2.63, 3.77, 6.65),
}


def paper_entry(metric: str, rate: float) -> Entry:
    """Return the paper's value in a row of Table 1, and its change in percent; an entry without runs if none."""
    if metric not in PAPER_TABLE_1 or rate not in PAPER_RATES:
        return Entry(float("nan"), None, None, 0)
    place = PAPER_RATES.index(rate)
    return Entry(PAPER_TABLE_1[metric][place], None, PAPER_CHANGES[metric][place - 1] if place else None, 1)


def table_1(results: Results) -> LossTable:
    """Return the paper's Table 1 with the paper's own rows next to ours."""
    rates = {trial.level: trial.cell.loss.p_grad for trial in results.study.trials if trial.level}
    levels: list[str | None] = [None, *results.study.levels]
    rows = []
    for name, metric in loss_metrics(results.weights).items():
        rows.append((name, tuple(results.entry("", level, metric) for level in levels)))
        if not name.endswith("(owner)"):
            theirs = name.partition(" (")[0]
            entries = tuple(paper_entry(theirs, rates[level] if level else 0.0) for level in levels)
            rows.append((f"{theirs}, paper", entries))
    return LossTable((results.study.baseline, *results.study.levels), tuple(rows), (*notes(results), SOURCE))


# --- scalars that runs recorded besides their losses, and their distance from predictions ----------------------------
# A scalar is the value at the end of a run (:meth:`Run.scalar`). Many, such as drift, do not exist without loss.


def scalar_tables(results: Results, names: Sequence[str]) -> dict[str, LossTable]:
    """Return all tables of one scalar, by file name. ``names``: the scalar, and its prediction if there is one."""
    name, *predicted = names
    file = file_name(name)
    tables = {file: _values(results, names)}
    if predicted:
        note = f"{name} over {predicted[0]} of the same run"
        against = excesses(results, name, lambda run: tuple(run.scalar(scalar) for scalar in names), note)
        tables[f"{file}_against_prediction"] = against
    return tables


def levels_with(results: Results, name: str) -> list[str | None]:
    """Return the study's levels, after None if runs without loss recorded the scalar too."""
    study = results.study
    without = any(results.by_seed(variant, None, scalar_metric(name)) for variant in study.variants)
    return [None, *study.levels] if without else list(study.levels)


def _values(results: Results, names: Sequence[str]) -> LossTable:
    """Return the scalars (rows, by variant) at every level (columns)."""
    levels = levels_with(results, names[0])
    rows = []
    for variant, name in product(results.study.variants, names):
        heading = (f"{variant}, predicted" if name != names[0] else variant) if variant else name
        own = tuple(results.entry(variant, level, scalar_metric(name), ScalarEntry) for level in levels)
        rows.append((heading, own))
    changes = any(entry.change is not None for _, entries in rows for entry in entries)
    values = f"values: {', '.join(names)}, {DEFINITION_WHOLE if names[0].endswith(WHOLE) else DEFINITION}"
    headings = tuple(level or results.study.baseline for level in levels)
    return LossTable(headings, tuple(rows), tuple(notes(results, values, changes)))


# --- the share of the cost of errors that the actions on them win back -----------------------------------------------
# The cost of a variant at a level is its change relative to the same seed without errors. The share is 1 - (mean cost of the
# variant) / (mean cost without any action): a ratio of means, since single seeds may have costs near 0. Its standard error is that
# of the ratio to first order: the spread over seeds of (cost - ratio x cost without any action), over the mean of the latter.


DIVERGED, COST_DIVERGED = "diverged", "cost diverged"


@dataclass(frozen=True)
class Share(Difference):
    """A share of costs in percent. ``instead``: the text to print in its place if a run of either side diverged."""

    instead: str = ""

    def __str__(self) -> str:
        return self.instead or super().__str__()


def share_won_back(plain: dict[int, float], own: dict[int, float]) -> Share:
    """Return the share in percent of the costs ``plain`` that is missing from the costs ``own``, both by seed.

    It has no value unless the mean of ``plain`` is above 0 by its 95 % interval: else there is no cost to win back.
    With fewer than two seeds there is no interval. ``runs`` are seeds.
    """
    seeds = sorted(plain.keys() & own.keys())
    for costs, name in ((own, DIVERGED), (plain, COST_DIVERGED)):
        if diverged := sum(math.isnan(costs[seed]) for seed in seeds):
            return Share(math.nan, None, None, len(seeds), diverged, instead=name)
    cost = Difference.of({seed: plain[seed] for seed in seeds})
    if (half := cost.half_width) is None or not cost.mean > half:
        return Share.of({})
    there, here = (np.array([costs[seed] for seed in seeds]) for costs in (plain, own))
    ratio = here.mean() / there.mean()
    shares = 100 * (1 - ratio - (here - ratio * there) / there.mean())
    return Share.of(dict(zip(seeds, shares.tolist(), strict=True)))


def won_back(results: Results, metric_name: str) -> LossTable | None:
    """Return the shares of every variant that acts on errors; None for a study of loss.

    The first variant does nothing. So does the first of each group of variants with other clean runs: of another
    optimizer, for example.
    """
    study, metric = results.study, loss_metrics(results.weights)[metric_name]
    if not study.errs:
        return None
    clean: dict[str, list[str]] = {variant: [] for variant in study.variants}
    for trial in study.trials:
        clean[trial.variant] += [trial.cell.name] if trial.level is None else []
    plain = {variant: next(name for name in clean if clean[name] == own) for variant, own in clean.items()}
    rows = []
    for variant, first in plain.items():
        if variant != first:
            costs = [[results.changes(name, level, metric) for name in (first, variant)] for level in study.levels]
            heading = f"{variant}, of {first}" if first != study.variants[0] else variant
            rows.append((heading, tuple(share_won_back(*pair) for pair in costs)))
    shares = {str(share) for _, entries in rows for share in entries}
    seeds = min((len(results.changes(name, level, metric)) for name in plain for level in study.levels), default=0)
    missing = "-: no cost beyond its 95 % interval" + (", or fewer than two seeds" if seeds < 2 else "")
    if COST_DIVERGED in shares:
        missing += f"; {COST_DIVERGED}: where nothing is done a run did, and none of the variant"
    note = (
        f"{metric_name}: share of the cost of errors that is won back, in percent of that of {study.variants[0]!r} or of "
        f"what is named, ratio of the means over seeds; {missing}; {INTERVAL}"
    )
    return LossTable(study.levels, tuple(rows), (note,)) if rows else None
