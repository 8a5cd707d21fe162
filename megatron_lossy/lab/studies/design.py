"""The design of a study: its file, and the cells that follow from it.

docs/study.md lists the keys of a file. Keys of ``settings``, levels and variants are flags of ``python -m
megatron_lossy.train``; ``p`` stands for ``p-grad`` and ``p-param``. A level can also be one of errors in gradients
(``grad-error``), with variants of the actions on them. Every variant is also trained without loss and errors, or with the
settings of the baseline: its changes refer to that run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.errors import UsageError, errors_in, refuse, with_origin
from ...base.flags import as_flag, incidental_fields
from ...config import LossyConfig, given
from ...config.refusal import check_refusals
from ...config.settings import arguments_of, from_origin, read_yaml
from ...config.shipped import find_config
from ...mechanisms.async_pipeline.flags import AsyncPipelineFlags
from ...mechanisms.islands.flags import IslandFlags
from ..report.runs import WHOLE
from ..report.scalars import AXES, needs_drift, needs_sharpness
from ..train.arguments import configurations, make_parser, read_arguments
from ..train.config import TrainConfig
from ..train.facts import check_flags, of_trainer
from ..virtual.island_schedule import check_schedule
from .cells import Cell, make_cell

# Flags that the study sets itself, that would end a run early, or that would name one folder for all cells.
_NOT_HERE = ("save", "load", "metrics_dir", "exit_interval", "tensorboard_dir", "delivery_log")
# Islands and asynchronous stages are no losses: the run without loss has them, too.
_OWN = [*dataclasses.fields(IslandFlags), *dataclasses.fields(AsyncPipelineFlags)]
_KEPT = tuple(f.name for f in _OWN if f.name != "p_sync")
# These do nothing without loss, but they are in the names of cells that are trained already.
_NAMED_BY = ("loss_unit", "packet_bytes", "loss_model")
#: The name of the column of clean runs: in studies of loss, and of errors.
NO_LOSS, NO_ERROR = "0 %", "no error"


@dataclass(frozen=True)
class Trial:
    """A cell in its place in the study. ``level`` and ``loss_seed`` are None for clean runs and the baseline."""

    variant: str
    level: str | None
    seed: int
    loss_seed: int | None
    cell: Cell


@dataclass(frozen=True)
class Study:
    """A study: its names, and its trials in the order of their runs."""

    title: str
    question: str
    level_name: str
    levels: tuple[str, ...]
    variants: tuple[str, ...]
    trials: tuple[Trial, ...]
    metrics: tuple[str, ...] = ()
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)
    baseline: str = NO_LOSS
    """The name of the level None."""
    paper: bool = False
    """Whether the report is the paper's Table 1, with its own rows for comparison, and its figures."""

    @property
    def errs(self) -> bool:
        """Whether levels are errors in gradients."""
        return any(trial.cell.loss.errs for trial in self.trials)

    @property
    def cells(self) -> list[Cell]:
        """The cells to run, each once."""
        return list(dict.fromkeys(trial.cell for trial in self.trials))


@dataclass(frozen=True)
class Design:
    """The content of a study file."""

    title: str
    question: str = ""
    config: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    seeds: Sequence[int] = (1, 2, 3)
    loss_seeds: Sequence[int] = (1, 2)
    level_name: str = "loss rate"
    levels: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=lambda: {"": {}})
    against: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metrics: Sequence[str] = ()
    baseline: Mapping[str, Any] | None = None
    paper: bool = False

    def study(self, arguments: Sequence[str] = ()) -> Study:
        """Return all cells, with ``arguments`` of the command line over ``settings``. Raise :class:`UsageError`."""
        config = ["--config", self.config] if self.config else []
        base = [*_arguments("settings", self.settings), *arguments]
        reference = _arguments("baseline", {k: v for k, v in (self.baseline or {}).items() if k != "name"})
        trials = []
        for variant, variant_settings in self.variants.items():
            own = _arguments(f"variant {variant}", variant_settings)
            trials += self._trials(variant, None, [*config, *base, *own, *reference])
            for level, level_settings in self.levels.items():
                theirs = _arguments(f"level {level}", level_settings)
                trials += self._trials(variant, level, [*config, *base, *theirs, *own])
        # Trials go seed by seed, so that an unfinished study already compares something.
        trials.sort(key=lambda trial: (self.seeds.index(trial.seed), trial.loss_seed or 0))
        return Study(
            self.title,
            self.question,
            self.level_name,
            tuple(self.levels),
            tuple(self.variants),
            tuple(trials),
            tuple(self.metrics),
            self.against,
            self._baseline(any(trial.cell.loss.errs for trial in trials)),
            self.paper,
        )

    def _baseline(self, errs: bool = False) -> str:
        """Return the name of the level None. ``errs``: levels are errors."""
        return str(self.baseline["name"]) if self.baseline else NO_ERROR if errs else NO_LOSS

    def _trials(self, variant: str, level: str | None, arguments: list[str]) -> list[Trial]:
        parser = make_parser("study", "")
        where = ", ".join(filter(None, (variant, level or self._baseline())))
        try:
            train, loss = configurations(read_arguments(parser, arguments))
            for config in (train, loss):
                for name in _NOT_HERE:
                    if getattr(config, name, None):
                        raise refuse(f"--{name.replace('_', '-')}", getattr(config, name), "cannot be given to a study")
            train.check_world(1)
            if loss.averages and not train.virtual_workers:
                raise refuse("--islands", loss.islands, "needs --virtual-workers in a study")
            check_refusals(loss, of_trainer(train, 1))
            loss.jobs().check(train.train_iters)
            check_schedule(loss, train.train_iters)
            if not train.sharpness_interval and (name := next(filter(needs_sharpness, self.metrics), None)):
                raise refuse("metrics:", repr(name), "is recorded with sharpness-interval only, which is 0")
            reference = self._reference(loss)
            if level is None and not self.levels:
                _check_nothing_dropped(loss, reference)
            if level is not None:
                if loss.lossless and not loss.errs:
                    raise UsageError("loses nothing: a level needs a loss rate, or errors in gradients")
                if not loss.drift_interval and (name := next(filter(needs_drift, self.metrics), None)):
                    raise refuse("metrics:", repr(name), "is recorded with drift-interval only, which is 0")
                check_flags(train, loss, 1)
        except UsageError as error:
            raise UsageError(f"{self.title}, {where}: {with_origin(error)}") from None
        trials = []
        for seed in self.seeds:
            seeded = dataclasses.replace(train, seed=seed)
            if level is None:
                trials.append(Trial(variant, None, seed, None, make_cell(seeded, reference)))
                continue
            for loss_seed in self.loss_seeds:
                lossy = dataclasses.replace(loss, loss_seed=loss_seed_of(seed, loss_seed))
                trials.append(Trial(variant, level, seed, loss_seed, make_cell(seeded, lossy)))
        return trials

    def _reference(self, loss: LossyConfig) -> LossyConfig:
        """Return the configuration that changes of ``loss`` refer to. Raise :class:`UsageError` if it loses or errs."""
        if self.baseline:
            return loss
        names = ["eval_weights"]
        if loss.averages or loss.async_pipeline:
            names += _KEPT
            if not loss.observed and not any(loss.phase(phase).sets_rate for phase in loss.exchanges()):
                names += _NAMED_BY
        reference = LossyConfig(**{name: getattr(loss, name) for name in names})
        if reference.draws() or reference.errs:
            raise UsageError(f"what changes refer to loses or errs: {reference.describe()}; name a baseline")
        return reference


def _check_nothing_dropped(loss: LossyConfig, reference: LossyConfig) -> None:
    """Raise :class:`UsageError` if ``loss`` needs levels and there are none: ``reference`` would run in its place."""
    if not (loss.draws() or loss.errs or loss.synchronises or loss.replica_check != "none"):
        return
    passed_over = incidental_fields(LossyConfig) | {"loss_seed", "save_replicas"}
    dropped = [
        as_flag(LossyConfig, name, value)
        for name, value in given(loss).items()
        if name not in passed_over and value != getattr(reference, name)
    ]
    if dropped:
        allowed = "needs levels, for example 'levels: {lossy: {}}'; without levels a study is of runs without loss"
        raise UsageError(f"{' '.join(dropped)}: {allowed}")


def loss_seed_of(seed: int, loss_seed: int) -> int:
    """Return the ``--loss-seed`` of a trial: another one for every seed of weights and data.

    If all trials had the same losses or errors, no error bar would cover the peculiarities of these.
    """
    return 1000 * seed + loss_seed


def read_design(file: str | Path, name: str | None = None) -> Design:
    """Return the design in a study file, under ``name`` if it holds several. Raise :class:`UsageError`."""
    file = find_config(file)
    content = read_yaml("STUDY", file)
    with errors_in(f"STUDY {file}"):
        return _design(_one_of(content, name), Path(file).parent)


def _one_of(content: Mapping[Any, Any], name: str | None) -> Mapping[Any, Any]:
    """Return the keys of the study ``name``: its own, and those that the file has for all."""
    if "studies" not in content:
        if name is not None:
            raise UsageError(f"holds one study, and none that is called {name!r}")
        return content
    studies = content["studies"]
    if not isinstance(studies, dict) or not all(isinstance(study, dict) for study in studies.values()):
        raise UsageError("studies: must be a mapping from names to studies")
    if name not in studies:
        names = ", ".join(map(str, studies))
        what = "holds several studies" if name is None else f"holds no study {name!r}"
        raise UsageError(f"{what}; name one of {names}")
    return {key: value for key, value in content.items() if key != "studies"} | studies[name]


def _design(content: Mapping[Any, Any], folder: Path) -> Design:
    content = {str(key).replace("-", "_"): value for key, value in content.items()}
    known = {field.name for field in dataclasses.fields(Design)}
    if unknown := sorted(set(content) - known):
        names = ", ".join(sorted(known)).replace("_", "-")
        raise refuse("unknown key", unknown[0].replace("_", "-"), f"must be one of {names}")
    if not content.get("title"):
        raise UsageError("needs a title")
    if not content.get("levels") and not content.get("variants"):
        raise UsageError("needs levels (of loss or errors), or variants to compare without them")
    for key in ("settings", "levels", "variants", "against"):
        if not isinstance(content.get(key, {}), dict):
            raise UsageError(f"{key}: must be a mapping")
    for key in ("levels", "variants"):
        if key in content:
            content[key] = {str(name): settings or {} for name, settings in content[key].items()}
            for name, settings in content[key].items():
                if not isinstance(settings, dict):
                    raise UsageError(f"{key}, {name}: must be a mapping from flags to values")
    for key in ("seeds", "loss_seeds"):
        if key in content:
            content[key] = check_seeds(f"{key.replace('_', '-')}:", content[key])
    if "baseline" in content:
        named = isinstance(content["baseline"], dict) and content["baseline"].get("name")
        if not named or str(named) in content.get("levels", {}):
            raise UsageError("baseline: must be a mapping with a name, which no level has, and settings")
    for pair in content.get("against", {}).items():
        for name in pair:
            if name not in content.get("variants", {}):
                raise refuse("against:", repr(name), "is no variant")
    if "metrics" in content:
        content["metrics"] = check_metrics("metrics:", content["metrics"])
    if content.get("config"):
        content["config"] = str(folder / content["config"])
    return Design(**content)


def check_seeds(flag: str, seeds: Any) -> list[int]:
    """Return ``seeds`` if they are different numbers. Raise :class:`UsageError`."""
    if not isinstance(seeds, list) or not seeds or not all(isinstance(seed, int) and seed >= 0 for seed in seeds):
        raise refuse(flag, seeds, "must be a list of whole numbers of at least 0")
    if len(set(seeds)) != len(seeds):
        raise refuse(flag, " ".join(map(str, seeds)), "must differ from each other")
    return seeds


def check_metrics(flag: str, names: Any) -> list[str]:
    """Return ``names`` if they are different scalars that training records. Raise :class:`UsageError`."""
    if not isinstance(names, list):
        raise refuse(flag, names, "must be a list of names; see docs/monitors.md")
    for name in names:
        if str(name).removesuffix(WHOLE) not in AXES:
            raise refuse(flag, f"{name!r}", f"is not recorded; must be one of {', '.join(AXES)}")
    if len(set(names)) != len(names):
        raise refuse(flag, ", ".join(map(repr, names)), "must differ from each other")
    return names


def _arguments(where: str, settings: Mapping[str, Any]) -> list[str]:
    """Return ``settings`` as command-line arguments. Raise :class:`UsageError`."""
    settings = dict(settings)
    if "p" in settings:
        rate = settings.pop("p")
        settings = {"p-grad": rate, "p-param": rate, **settings}
    with errors_in(where):
        return from_origin(arguments_of(settings, (TrainConfig, LossyConfig)), f"from the study, {where}")
