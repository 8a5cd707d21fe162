"""``python -m megatron_lossy.lab``: studies in files, and their reports once more."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...base import device
from ...base.errors import ArgumentParser, UsageError, check_package, refuse
from ...base.files import check_folder
from ...base.flags import did_you_mean
from ..train.arguments import make_parser
from .cells import CellFolder, Tally, run_cells
from .design import Study, check_metrics, check_seeds, read_design
from .folder import check_no_runs, check_out, read_record, results_of, tables, write_figures, write_record, write_tables
from .summary import Results


def study(arguments: Sequence[str]) -> int:
    """Run a study file and report it; returns the exit status. Raise :class:`UsageError`."""
    study, how, name = _read_study(arguments)
    out = Path(how.out or Path("runs") / name)
    check_folder("--out", out)
    check_no_runs(out, how.cells)
    check_out(out, study)
    if how.list:
        _list(study, how.cells)
        return 0
    check_package("matplotlib", "--out", out, "matplotlib")
    tally = Tally()
    if not how.report_only:
        check_folder("--cells", how.cells)
        cores = len(os.sched_getaffinity(0)) if device.device_type() == "cpu" else 1
        tally = run_cells(study.cells, how.cells, how.jobs or cores)
    folders = [CellFolder(how.cells, cell) for cell in study.cells]
    if runs := {folder.cell.name: folder.result() for folder in folders if folder.state is not None}:
        results = Results(study, runs)
        files, found = [write_record(results, out)], tables(results)
        print(f"\n{study.title}" + (f": {study.question}" if study.question else "") + "\n")
        for table in found.values():
            print(table.text())
        files += write_tables(results, found, out)
        files += write_figures(results, out, curves=all(run.train for run in runs.values()))
        print("wrote " + ", ".join(map(str, files)))
    else:
        print("no cell is done yet")
    for name, reason in tally.failed.items():
        print(f"cell {name} failed: {reason}", file=sys.stderr)
    if tally.interrupted:
        print("interrupted; run the same command again to continue")
    elif tally.elsewhere:
        print(f"{tally.elsewhere} cells are trained by other processes")
    return 1 if tally.failed or tally.interrupted else 0


def report(arguments: Sequence[str]) -> None:
    """Make tables and figures again from the records of reports. Raise :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy.lab report",
        description="Make the tables and figures of reports again from their study.json, without the cells, "
        "which the curves of Table 1 need: --report-only draws them.",
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", help="folder of a report")
    folders = [Path(folder) for folder in parser.parse_args(arguments).folders]
    check_package("matplotlib", "FOLDER", folders[0], "matplotlib")
    for folder, results in [(folder, recorded(folder)) for folder in folders]:
        files = write_tables(results, tables(results), folder)
        files += write_figures(results, folder, curves=False)
        print(f"{folder}: {len(files)} files")


def recorded(folder: Path) -> Results:
    """Return the results in the folder of a report. Raise :class:`UsageError`."""
    record = read_record("FOLDER", folder)
    try:
        study, *_ = _read_study(record.command)
    except UsageError as error:
        raise refuse("FOLDER", folder, f"its study.json cannot be made again here: {error}") from None
    return results_of(record, study, folder)


def _read_study(arguments: Sequence[str]) -> tuple[Study, argparse.Namespace, str]:
    """Return the study that ``arguments`` name, how to run it, and its own name or that of its file."""
    parser = ArgumentParser(
        "python -m megatron_lossy.lab",
        description="Run the study in a file, and report it.",
        epilog="All flags of python -m megatron_lossy.train are allowed too, for all cells.",
        allow_abbrev=False,
    )
    add = parser.add_argument_group("study").add_argument
    add("--out", metavar="DIR", help="folder of the report: tables and figures")
    shared = "folder of the training runs, shared by all studies; what is there is not run again; default runs/cells"
    add("--cells", default="runs/cells", metavar="DIR", help=shared)
    add("--jobs", type=int, metavar="N", help="cells to run at once; default one, on a CPU one per core")
    seeds = "seeds of weights and data, in every condition; default the study's, or 1 2 3"
    add("--seeds", type=int, nargs="+", metavar="SEED", help=seeds)
    loss_seeds = "seeds of the losses, with each of --seeds; default the study's, or 1 2"
    add("--loss-seeds", type=int, nargs="+", metavar="SEED", help=loss_seeds)
    metrics = "recorded scalars to report besides the losses (docs/monitors.md); default the study's, or none"
    add("--metrics", nargs="+", metavar="NAME", help=metrics)
    add("--list", action="store_true", help="print the cells and what became of them, and run nothing")
    add("--report-only", action="store_true", help="report what is there, and run nothing")
    parser.add_argument("study", metavar="STUDY", help="study file (YAML), see docs/study.md")
    parser.add_argument("name", metavar="NAME", nargs="?", help="which study, if the file holds several")
    how, rest = _split(parser, arguments)
    if any(argument.split("=")[0] == "--config" for argument in rest):
        raise UsageError("--config: cannot be given to a study, whose file names it")
    given = {name: value for name in ("seeds", "loss_seeds", "metrics") if (value := getattr(how, name)) is not None}
    return replace(read_design(how.study, how.name), **given).study(rest), how, how.name or Path(how.study).stem


def _split(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return our own flags, and those of the training program. Raise :class:`UsageError` for unknown ones."""
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
    how = parser.parse_args(own)
    training.parse_args(rest)
    if how.jobs is not None and how.jobs < 1:
        raise refuse("--jobs", how.jobs, "must be at least 1")
    for flag, seeds in (("--seeds", how.seeds), ("--loss-seeds", how.loss_seeds)):
        if seeds is not None:
            check_seeds(flag, seeds)
    if how.metrics is not None:
        check_metrics("--metrics", how.metrics)
    return how, rest


def _list(study: Study, root: str) -> None:
    states = {}
    for folder in [CellFolder(root, cell) for cell in study.cells]:
        state = folder.state
        states[folder.cell] = state["status"] if state else "running" if folder.taken else "to do"
    for trial in study.trials:
        seeds = f"seed {trial.seed}" + (f", loss seed {trial.loss_seed}" if trial.loss_seed is not None else "")
        where = ", ".join(filter(None, (trial.variant, trial.level or study.baseline)))
        print(f"{trial.cell.name}  {where}, {seeds}: {states[trial.cell]}")
