"""``python -m megatron_lossy.lab``: Table 1, studies in files, and their reports once more."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...base.errors import ArgumentParser, UsageError, check_package, refuse
from ...base.files import check_folder
from ...base.flags import add_flags, did_you_mean, flag, from_namespace
from ..report import LossTable, Run
from ..train.arguments import make_parser
from .cells import CellFolder
from .design import Design, Study, check_metrics, check_seeds, read_design
from .folder import (
    check_no_runs,
    check_out,
    read_command,
    read_record,
    read_recorded_runs,
    tables,
    write_figures,
    write_record,
    write_tables,
)
from .runner import Tally, run_cells
from .summary import Results


@dataclass(frozen=True)
class StudyConfig:
    """The settings for running a study, and the folder of its report."""

    out: str | None = flag(None, "folder of the report: tables and figures", type=str, metavar="DIR")
    cells: str = flag(
        "runs/cells",
        "folder of the training runs, shared by all studies; what is there is not run again",
        metavar="DIR",
    )
    records: tuple[str, ...] = flag(
        (),
        "folders of earlier reports: runs that their study.json holds are not run again, though --cells has none of them",
        type=str,
        nargs="+",
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
    """The rates and processes of Table 1."""

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
    study, how, rates = _read_table1(arguments)
    return _run(study, how, Path(how.out or "runs/table1"), rates)


def study(arguments: Sequence[str]) -> int:
    """Run a study file and report it; returns the exit status. Raises :class:`UsageError`."""
    study, how, name = _read_study(arguments)
    return _run(study, how, Path(how.out or Path("runs") / name), None)


def report(arguments: Sequence[str]) -> None:
    """Make tables and figures again from the records of reports. Raises :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy.lab report",
        description="Make the tables and figures of reports again from their study.json, without the cells. "
        "The curves of Table 1 need the cells: table1 --report-only draws them.",
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="folder of a report")
    folders = [Path(folder) for folder in parser.parse_args(arguments).folders]
    check_package("matplotlib", "FOLDER", folders[0], "matplotlib")
    for folder, (results, rates) in [(folder, recorded(folder)) for folder in folders]:
        files = write_tables(results, tables(results, rates), folder)
        files += write_figures(results, folder, rates, curves=False)
        print(f"{folder}: {len(files)} files")


def recorded(folder: Path) -> tuple[Results, dict[str, float] | None]:
    """The results in the folder of a report, and the rates of Table 1's levels. Raises :class:`UsageError`."""
    words = read_command(folder)
    rates = None
    if words[:1] == ["table1"]:
        study, _, rates = _read_table1(words[1:])
    else:
        study, *_ = _read_study(words)
    return read_record(folder, study), rates


def recorded_tables(folder: Path) -> dict[str, LossTable]:
    """All tables of the report in ``folder``, made from its records. Raises :class:`UsageError`."""
    return tables(*recorded(folder))


def _read_table1(arguments: Sequence[str]) -> tuple[Study, StudyConfig, dict[str, float]]:
    """The study of Table 1 with ``arguments``, how to run it, and the rate of each level."""
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
    return _study(design, how, rest), how, rates


def _read_study(arguments: Sequence[str]) -> tuple[Study, StudyConfig, str]:
    """The study that ``arguments`` name, how to run it, and its own name or that of its file."""
    parser = _parser("", "Run the study in a file, and report it.")
    parser.add_argument("study", metavar="STUDY", help="study file (YAML), see docs/study.md")
    parser.add_argument("name", metavar="NAME", nargs="?", help="which study, if the file holds several")
    own, rest = _split(parser, arguments)
    how = from_namespace(StudyConfig, own)
    if any(argument.split("=")[0] == "--config" for argument in rest):
        raise UsageError("--config: cannot be given to a study, whose file names it")
    return _study(read_design(own.study, own.name), how, rest), how, own.name or Path(own.study).stem


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
    # Both parsers see all flags: a flag of one parser takes its values, whatever flags the other has.
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
    check_no_runs(out, how.cells)
    check_out(out, study)
    recorded = {
        name: run for folder in how.records for name, run in read_recorded_runs(Path(folder), study.metrics).items()
    }
    if how.list:
        _list(study, how.cells, recorded)
        return 0
    check_package("matplotlib", "--out", out, "matplotlib")
    tally = Tally()
    if not how.report_only:
        check_folder("--cells", how.cells)
        missing = [cell for cell in study.cells if cell.name not in recorded]
        tally = run_cells(missing, how.cells, how.jobs or _default_jobs(study, how), how.devices or ())
    runs = {}
    for cell in study.cells:
        folder = CellFolder(how.cells, cell)
        if folder.state is not None:
            runs[cell.name] = folder.result()
        elif cell.name in recorded:
            runs[cell.name] = recorded[cell.name]
    if runs:
        _report(Results(study, runs), out, rates)
    else:
        print("no cell is done yet")
    return _explain(tally, len(study.cells) - len(runs))


def _default_jobs(study: Study, how: StudyConfig) -> int:
    if how.devices:
        return len(how.devices)
    from ...base import device

    if device.device_type() != "cpu":
        return 1
    return max(1, len(os.sched_getaffinity(0)) // study.cells[0].processes)


def _list(study: Study, root: str, recorded: Mapping[str, Run]) -> None:
    states = {}
    for cell in study.cells:
        folder = CellFolder(root, cell)
        state = folder.state
        there = "recorded" if cell.name in recorded else "to do"
        states[cell] = state["status"] if state else "running" if folder.taken else there
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
        print(f"{tally.elsewhere} cells are trained by other processes")
    return 1 if tally.failed or tally.interrupted else 0


def _report(results: Results, out: Path, rates: dict[str, float] | None) -> None:
    study = results.study
    files = [write_record(results, out)]
    print(f"\n{study.title}" + (f": {study.question}" if study.question else "") + "\n")
    found = tables(results, rates)
    for table in found.values():
        print(table.text())
    files += write_tables(results, found, out)
    files += write_figures(results, out, rates, curves=all(run.train for run in results.runs.values()))
    print("wrote " + ", ".join(map(str, files)))
