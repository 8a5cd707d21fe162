"""The share of the cost of errors that the actions on them win back.

The cost of a variant at a level is its change relative to the same seed without errors. The share is 1 - (mean cost of
the variant) / (mean cost without any action): a ratio of means, since single seeds may have costs near 0. Its standard
error is that of the ratio to first order: the spread over seeds of (cost - ratio x cost without any action), over the
mean of the latter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..report import LossTable
from .summary import INTERVAL, Difference, Results, loss_metrics

DIVERGED, COST_DIVERGED = "diverged", "cost diverged"


@dataclass(frozen=True)
class Share(Difference):
    """A share of costs in percent. ``instead``: the text to print in its place if a run of either side diverged."""

    instead: str = ""

    def __str__(self) -> str:
        return self.instead or super().__str__()


def share_won_back(plain: dict[int, float], own: dict[int, float]) -> Share:
    """The share in percent of the costs ``plain`` that is missing from the costs ``own``, both by seed.

    It has no value unless the mean of ``plain`` is above 0 by its 95 % interval: else there is no cost to win back.
    With fewer than two seeds there is no interval. ``runs`` are seeds.
    """
    seeds = sorted(plain.keys() & own.keys())
    for costs, name in ((own, DIVERGED), (plain, COST_DIVERGED)):
        if diverged := sum(math.isnan(costs[seed]) for seed in seeds):
            return Share(math.nan, None, None, len(seeds), diverged, instead=name)
    cost = Difference.of({seed: plain[seed] for seed in seeds})
    half = cost.half_width
    if half is None or not cost.mean > half:
        return Share.of({})
    there, here = (np.array([costs[seed] for seed in seeds]) for costs in (plain, own))
    ratio = here.mean() / there.mean()
    shares = 100 * (1 - ratio - (here - ratio * there) / there.mean())
    return Share.of(dict(zip(seeds, shares.tolist(), strict=True)))


def won_back(results: Results, metric_name: str) -> LossTable | None:
    """The shares of every variant that acts on errors; None for a study of loss.

    The first variant does nothing. So does the first of each group of variants with other clean runs: of another
    optimizer, for example.
    """
    study, metric = results.study, loss_metrics(results)[metric_name]
    if not study.errs:
        return None
    plain = {variant: _plain(results, variant) for variant in study.variants}
    rows = tuple(
        (
            f"{variant}, of {first}" if first != study.variants[0] else variant,
            tuple(
                share_won_back(results.changes(first, level, metric), results.changes(variant, level, metric))
                for level in study.levels
            ),
        )
        for variant, first in plain.items()
        if variant != first
    )
    shares = {str(share) for _, entries in rows for share in entries}
    seeds = min(
        (len(results.changes(variant, level, metric)) for variant in plain for level in study.levels), default=0
    )
    missing = "-: no cost beyond its 95 % interval" + (", or fewer than two seeds" if seeds < 2 else "")
    if COST_DIVERGED in shares:
        missing += f"; {COST_DIVERGED}: where nothing is done a run did, and none of the variant"
    note = (
        f"{metric_name}: share of the cost of errors that is won back, in percent of that of {study.variants[0]!r} or of "
        f"what is named, ratio of the means over seeds; {missing}; {INTERVAL}"
    )
    return LossTable(study.levels, rows, (note,)) if rows else None


def _plain(results: Results, variant: str) -> str:
    """The first variant that has the same clean runs."""
    clean = {
        name: [trial.cell.name for trial in results.study.trials if (trial.variant, trial.level) == (name, None)]
        for name in results.study.variants
    }
    return next(name for name in results.study.variants if clean[name] == clean[variant])
