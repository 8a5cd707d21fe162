"""Groups runs into columns: one per loss rate, and one per setting if runs of one rate differ in it.

Some sections of flags name a column by all of their flags: those of errors in gradients and of the actions on them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from ...base.flags import incidental_fields, of_flags
from ...config import SECTIONS, LossyConfig
from ..train.config import TrainConfig
from .runs import Run

# Repetitions of one setting differ in these.
SEEDS = {"seed", "loss_seed"}
_RATES = {"p_grad", "p_param"}
_LOSS_FLAGS = {f.name for f in dataclasses.fields(LossyConfig)}
# Settings of saving, logging and evaluation change no weight.
_NO_MATTER = incidental_fields(TrainConfig) | incidental_fields(LossyConfig) | {"save_replicas", "eval_weights"}
# A run may go on with other values of these, but they decide which units a network loses, and which come too late.
_NO_MATTER -= {"udp_rate", "udp_memory", "udp_fec"}


@dataclass(frozen=True)
class Column:
    """Runs that repeat one setting. ``settings``: the settings in which runs of the same rate differ."""

    label: str
    runs: tuple[Run, ...]
    settings: tuple[str, ...]

    @property
    def clean(self) -> bool:
        return self.runs[0].clean

    @property
    def repetitions(self) -> int:
        """The number of runs that differ in a seed that matters to them."""
        return len({(run.seed, None if self.clean else run.loss_seed) for run in self.runs})


def columns(runs: Sequence[Run]) -> list[Column]:
    """Return ``runs`` by column, in the order of the columns' first runs."""
    alike: dict[Any, list[Run]] = {}
    for run in runs:
        alike.setdefault(run.condition, []).append(run)
    differing = set().union(*map(_differing, alike.values())) - SEEDS - _RATES
    split: dict[Any, list[Run]] = {}
    for run in runs:
        split.setdefault((run.condition, _settings(run, differing)), []).append(run)
    groups = [(settings, group) for (_, settings), group in split.items()]
    return [Column(", ".join([group[0].label, *settings]), tuple(group), settings) for settings, group in groups]


def baseline(of: Column, among: Sequence[Column]) -> Column | None:
    """Return the clean column to compare ``of`` with: the only one, or the one whose settings ``of`` has too."""
    if len(clean := [column for column in among if column.clean]) > 1:
        clean = [column for column in clean if set(column.settings) <= set(of.settings)]
    return clean[0] if clean else None


def other_differences(runs: Sequence[Run]) -> list[str]:
    """Return the settings besides the loss flags in which runs differ. Then the loss does not explain everything."""
    return sorted(_differing(runs) - SEEDS - _LOSS_FLAGS)


def _differing(runs: Sequence[Run]) -> set[str]:
    keys = set().union(*(run.config for run in runs)) - _NO_MATTER
    return {key for key in keys if len({repr(run.config.get(key)) for run in runs}) > 1}


def _settings(run: Run, differing: Set[str]) -> tuple[str, ...]:
    """Return ``differing`` keys as labels. For a run without loss, loss flags are left out: they had no effect."""
    keys = differing - _LOSS_FLAGS if run.clean else differing | _given_of_sections(run)
    labels = []
    for key in sorted(keys):
        value = run.config.get(key)
        words = isinstance(value, list) and all(isinstance(word, str) for word in value)  # as they are written
        labels.append(f"{key.replace('_', '-')} {' '.join(value) if words else value}")
    return tuple(labels)


def _given_of_sections(run: Run) -> set[str]:
    """Return the given flags of the sections that name all of them."""
    found, worked_out = set(), LossyConfig()
    for cls in SECTIONS:
        if not cls.in_headings:
            continue
        flags, defaults = of_flags(cls, run.config), cls()
        for name in (f.name for f in dataclasses.fields(cls)):
            if getattr(flags, name) not in (getattr(defaults, name), getattr(worked_out, name)):
                found.add(name)
    return found
