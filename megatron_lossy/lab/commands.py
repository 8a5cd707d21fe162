"""``python -m megatron_lossy.lab``: Table 1, and studies in files."""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import ArgumentParser, UsageError, check_package, refuse
from ..files import check_folder, write_text
from ..flags import add_flags, did_you_mean, flag, from_namespace
from ..report import LossTable
from ..report.scalars import file_name, with_predictions
from ..train.arguments import make_parser
from ..train.metrics import METRICS_FILE
from .cells import Cell, CellFolder
from .design import Design, Study, check_metrics, check_seeds, read_design
from .runner import Tally, run_cells
from .scalars import scalar_tables
from .summary import (
    Results,
    against_best,
    comparison,
    differences,
    loss_metrics,
    replica_against_owner,
    run_table,
    table_1,
)
from .won_back import won_back

SUMMARY, RUNS = "study.json", "runs.csv"
_FIRST, _LEVEL = "settings of the first cell", "first level"
# Reports that differ in these are of one study: more seeds, or drift measured too.
_NO_OTHER_REPORT = {"seed", "loss-seed", "drift-interval"}


@dataclass(frozen=True)
class StudyConfig:
    """How a study is run, and where its report goes."""

    out: str | None = flag(None, "folder of the report: tables and figures", type=str, metavar="DIR")
    cells: str = flag(
        "runs/cells",
        "folder of the training runs, shared by all studies; what is there is not run again",
        metavar="DIR",
    )
    jobs: int | None = flag(
        None,
        "cells to run at once; default one per device, on a CPU one per core and rank",
        type=int,
        metavar="N",
    )
    devices: tuple[str, ...] | None = flag(
        None, "accelerators to give to the cells in turn, by number or name", nargs="+", metavar="DEVICE"
    )
    seeds: tuple[int, ...] | None = flag(
        None,
        "seeds of weights and data, in every condition; default the study's, or 1 2 3",
        type=int,
        nargs="+",
        metavar="SEED",
    )
    loss_seeds: tuple[int, ...] | None = flag(
        None,
        "seeds of the losses, with each of --seeds; default the study's, or 1 2",
        type=int,
        nargs="+",
        metavar="SEED",
    )
    metrics: tuple[str, ...] | None = flag(
        None,
        "recorded scalars to report beside the losses (docs/monitors.md); default the study's, or none",
        type=str,
        nargs="+",
        metavar="NAME",
    )
    list: bool = flag(False, "print the cells and what became of them, and run nothing")
    report_only: bool = flag(False, "report what is there, and run nothing")

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise refuse("--jobs", self.jobs, "must be at least 1")
        for name in ("seeds", "loss_seeds"):
            if getattr(self, name) is not None:
                check_seeds(f"--{name.replace('_', '-')}", list(getattr(self, name)))
        if self.metrics is not None:
            check_metrics("--metrics", list(self.metrics))


@dataclass(frozen=True)
class Table1Config:
    """What Table 1 compares."""

    rates: tuple[float, ...] = flag(
        (0.1, 0.2, 0.3, 0.4),
        "loss rates of gradients and parameters, beside 0",
        type=float,
        nargs="+",
        metavar="P",
    )
    processes: int = flag(1, "ranks of each cell, under torchrun; 1 with --virtual-workers", metavar="N")

    def __post_init__(self) -> None:
        for rate in self.rates:
            if not 0 <= rate < 1:
                raise refuse("--rates", rate, "must be in [0, 1)")
        if len(set(self.rates)) != len(self.rates):
            raise refuse("--rates", " ".join(map(str, self.rates)), "must differ from each other")
        if self.processes < 1:
            raise refuse("--processes", self.processes, "must be at least 1")


_TABLE_1 = "Training under packet loss"


def table1(arguments: Sequence[str]) -> int:
    """Run the sweep of Table 1 and report it; returns the exit status. Raises :class:`UsageError`."""
    parser = _parser("table1", "Train at several loss rates and seeds, and print the paper's Table 1.")
    add_flags(parser, Table1Config, "Table 1")
    own, rest = _split(parser, arguments)
    sweep, how = from_namespace(Table1Config, own), from_namespace(StudyConfig, own)
    rates = {f"{100 * rate:g} %": rate for rate in sweep.rates if rate}
    for name in ("--p-grad", "--p-param"):
        if any(argument.split("=")[0] == name for argument in rest):
            raise UsageError(f"{name}: cannot be given to a sweep over --rates")
    design = Design(
        title=_TABLE_1,
        question="What does loss cost?",
        processes=sweep.processes,
        levels={name: {"p": rate} for name, rate in rates.items()},
    )
    study = _study(design, how, rest)
    return _run(study, how, Path(how.out or "runs/table1"), rates)


def study(arguments: Sequence[str]) -> int:
    """Run a study file and report it; returns the exit status. Raises :class:`UsageError`."""
    parser = _parser("", "Run the study in a file, and report it.")
    parser.add_argument("study", metavar="STUDY", help="study file (YAML), see docs/study.md")
    own, rest = _split(parser, arguments)
    how = from_namespace(StudyConfig, own)
    if any(argument.split("=")[0] == "--config" for argument in rest):
        raise UsageError("--config: cannot be given to a study, whose file names it")
    design = _study(read_design(own.study), how, rest)
    return _run(design, how, Path(how.out or Path("runs") / Path(own.study).stem), None)


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = ArgumentParser(
        f"python -m megatron_lossy.lab {name}".strip(),
        description=description,
        epilog="All flags of python -m megatron_lossy.train are allowed too, for all cells.",
        allow_abbrev=False,
    )
    return add_flags(parser, StudyConfig, "study")


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags, and those of the training program. Raises :class:`UsageError` for unknown ones."""
    training = make_parser("study", "")
    # Both parsers see all flags: a flag of one takes its values whatever the other has.
    flags = {option for action in parser._actions for option in action.option_strings}
    own: list[str] = []
    rest: list[str] = []
    target = own
    for argument in arguments:
        if argument.startswith("--"):
            target = own if argument.split("=")[0] in flags else rest
        target.append(argument)
    known = flags | training._option_string_actions.keys()
    if unknown := [word for word in rest if word.startswith("--") and word.split("=")[0] not in known]:
        raise UsageError(f"unrecognized arguments: {' '.join(unknown)}{did_you_mean(unknown, known)}")
    namespace = parser.parse_args(own)
    training.parse_args(rest)
    return namespace, rest


def _study(design: Design, how: StudyConfig, arguments: Sequence[str]) -> Study:
    changes = {
        name: list(getattr(how, name)) for name in ("seeds", "loss_seeds", "metrics") if getattr(how, name) is not None
    }
    return replace(design, **changes).study(arguments)


def _run(study: Study, how: StudyConfig, out: Path, rates: dict[str, float] | None) -> int:
    check_folder("--out", out)
    _check_no_runs(out, how.cells)
    _check_out(out, study)
    if how.list:
        _list(study, how.cells)
        return 0
    check_package("matplotlib", "--out", out, "matplotlib")
    tally = Tally()
    if not how.report_only:
        check_folder("--cells", how.cells)
        tally = run_cells(study.cells, how.cells, how.jobs or _default_jobs(study, how), how.devices or ())
    runs = {}
    for cell in study.cells:
        folder = CellFolder(how.cells, cell)
        if folder.state is not None:
            runs[cell.name] = folder.result()
    if runs:
        _report(Results(study, runs), out, rates)
    else:
        print("no cell is done yet")
    return _explain(tally, len(study.cells) - len(runs))


def _default_jobs(study: Study, how: StudyConfig) -> int:
    if how.devices:
        return len(how.devices)
    from .. import device

    if device.device_type() != "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // study.cells[0].processes)


def _list(study: Study, root: str) -> None:
    states = {}
    for cell in study.cells:
        folder = CellFolder(root, cell)
        state = folder.state
        running = folder.holder()
        states[cell] = state["status"] if state else f"running on {running}" if running else "to do"
    for trial in study.trials:
        seeds = f"seed {trial.seed}" + (f", loss seed {trial.loss_seed}" if trial.loss_seed is not None else "")
        where = ", ".join(filter(None, (trial.variant, trial.level or study.baseline)))
        print(f"{trial.cell.name}  {where}, {seeds}: {states[trial.cell]}")


def _explain(tally: Tally, missing: int) -> int:
    for name, reason in tally.failed.items():
        print(f"cell {name} failed: {reason}", file=sys.stderr)
    if tally.interrupted:
        print("interrupted; run the same command again to continue")
    elif tally.elsewhere:
        print(f"{len(tally.elsewhere)} cells are trained by others: {', '.join(sorted(set(tally.elsewhere)))}")
    return 1 if tally.failed or tally.interrupted else 0


def _check_no_runs(out: Path, cells: str) -> None:
    """A report is not written among runs, which a study that is named after their folder would do."""
    if out.resolve() == Path(cells).resolve():
        raise refuse("--out", out, "is the folder of --cells; choose another")
    if (out / SUMMARY).exists():
        return  # a report that is there already
    if run := next(iter([*out.glob(METRICS_FILE), *out.glob(f"*/{METRICS_FILE}")]), None):
        raise refuse("--out", out, f"holds a run ({run}); choose another folder for the report")


def _check_out(out: Path, study: Study) -> None:
    """A folder holds the report of one study, which may have got more seeds, levels or variants."""
    try:
        summary = json.loads((out / SUMMARY).read_text())
        title, first, level = summary.get("title"), summary.get(_FIRST), summary.get(_LEVEL)
        pairs = [(dict(first), study.trials[0])] if first else []
        if level:
            place = level["variant"], level["level"]
            pairs += [
                (dict(level["settings"]), trial) for trial in study.trials if (trial.variant, trial.level) == place
            ]
    except FileNotFoundError:
        return
    except (AttributeError, KeyError, OSError, TypeError, ValueError):
        raise refuse("--out", out, f"{SUMMARY} there cannot be read; choose another folder") from None
    if title != study.title:
        raise refuse("--out", out, f"holds the report of another study, {title!r}; choose another folder")
    for there, trial in pairs:
        here = _settings(trial.cell)
        for name in sorted((there.keys() | here.keys()) - _NO_OTHER_REPORT):
            if there.get(name) != here.get(name):
                values = f"--{name} {_value(there, name)}, not {_value(here, name)}"
                raise refuse("--out", out, f"holds a report with {values}; choose another folder")
    _check_smaller(out, study)


def _check_smaller(out: Path, study: Study) -> None:
    """Raise :class:`UsageError` if the report in ``out`` has a run that ``study`` has no place for."""
    try:
        rows = list(csv.DictReader((out / RUNS).read_text().splitlines()))
        there = [(row["variant"], row["level"], row["seed"], row["loss seed"]) for row in rows]
    except (KeyError, OSError):  # of an earlier version
        return
    here = set()
    for trial in study.trials:
        loss_seed = str(trial.cell.loss.loss_seed) if trial.level else ""
        here.add((trial.variant, trial.level or study.baseline, str(trial.seed), loss_seed))
    for variant, level, seed, loss_seed in there:
        if (variant, level, seed, loss_seed) not in here:
            what = ", ".join(filter(None, (variant, level, f"seed {seed}", loss_seed and f"loss seed {loss_seed}")))
            raise refuse("--out", out, f"holds a larger report, with {what}; choose another folder")


def _settings(cell: Cell) -> dict[str, Any]:
    """The settings of ``cell``, and its number of processes, as JSON has them."""
    processes = {"processes": cell.processes} if cell.processes > 1 else {}
    return json.loads(json.dumps(cell.settings | processes))


def _value(settings: Mapping[str, Any], name: str) -> str:
    value = settings.get(name, "as by default")
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _report(results: Results, out: Path, rates: dict[str, float] | None) -> None:
    from .figures import plot_comparison, plot_figure_1, plot_figure_2, plot_scalar

    study = results.study
    out.mkdir(parents=True, exist_ok=True)
    validation = {file_name(name): name for name in loss_metrics(results) if name.startswith("val loss")}
    tables: dict[str, LossTable] = {}
    if rates is not None:
        tables["table1"] = table_1(results, rates)
    else:
        for file, metric in validation.items():
            tables[file] = comparison(results, metric)
            tables |= {f"{file}_{name}": table for name, table in differences(results, metric).items()}
            for name, table in (("against_best", against_best), ("won_back", won_back)):
                if (found := table(results, metric)) is not None:
                    tables[f"{file}_{name}"] = found
    if weights := replica_against_owner(results):
        tables["replica_against_owner"] = weights
    scalars = with_predictions(study.metrics)
    for names in scalars:
        tables |= scalar_tables(results, names)
    summary: dict[str, Any] = {
        "title": study.title,
        "question": study.question,
        # What would make this report from nothing.
        "command": shlex.join(
            ["python", "-m", "megatron_lossy.lab", *(a for a in sys.argv[1:] if a != "--report-only")]
        ),
        _FIRST: _settings(study.trials[0].cell),
    }
    if (trial := next((trial for trial in study.trials if trial.level is not None), None)) is not None:
        summary[_LEVEL] = {"variant": trial.variant, "level": trial.level, "settings": _settings(trial.cell)}
    write_text(out / SUMMARY, json.dumps(summary, indent=1))
    write_text(out / RUNS, run_table(results))
    files = [out / SUMMARY, out / RUNS]
    print(f"\n{study.title}" + (f": {study.question}" if study.question else "") + "\n")
    for name, table in tables.items():
        print(table.text())
        for suffix, text in (("csv", table.csv()), ("md", table.markdown()), ("tex", table.latex())):
            file = out / f"{name}.{suffix}"
            write_text(file, text)
            files.append(file)
    if rates is not None:
        files += plot_figure_1(results, out / "figure1") + plot_figure_2(results, out / "figure2")
    else:
        for file, metric in validation.items():
            files += plot_comparison(results, metric, out / file)
    for names in scalars:
        files += plot_scalar(results, names, out / file_name(names[0]))
    print("wrote " + ", ".join(map(str, files)))
