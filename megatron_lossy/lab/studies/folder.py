"""The folder of a study's report: its record, and the tables and figures that are made from it.

``study.json`` has the command, the place of the runs, and the end of every run. All else except the curves of Table 1 can
be made again from it, without the cells (``python -m megatron_lossy.lab report FOLDER``).
"""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ...base.errors import refuse
from ...base.files import write_text
from ..report import LossTable, Run
from ..report.runs import WEIGHTS
from ..report.scalars import file_name, with_predictions
from ..train.metrics import METRICS_FILE
from .design import Study
from .summary import (
    RUN_COLUMNS,
    Results,
    against_best,
    comparison,
    differences,
    loss_metrics,
    replica_against_owner,
    run_table,
    trained,
)
from .tables import scalar_tables, table_1, won_back

RECORD = "study.json"
Place = tuple[str, str, str, str]


def check_no_runs(out: Path, cells: str) -> None:
    """Raise :class:`UsageError` for a report among runs, where a study that is named after their folder would write."""
    if out.resolve() == Path(cells).resolve():
        raise refuse("--out", out, "is the folder of --cells; choose another")
    if (out / RECORD).exists():
        return  # a report that is there already
    if run := next(iter([*out.glob(METRICS_FILE), *out.glob(f"*/{METRICS_FILE}")]), None):
        raise refuse("--out", out, f"holds a run ({run}); choose another folder for the report")


def check_out(out: Path, study: Study) -> None:
    """Raise :class:`UsageError` for the folder of another study. This one may have got more seeds or conditions."""
    if not (out / RECORD).exists():
        return
    record, here = read_record("--out", out), _cells(study)
    if record.title != study.title:
        raise refuse("--out", out, f"holds the report of another study, {record.title!r}; choose another folder")
    for place, cell, _ in record.runs:
        if here.get(place) != cell:
            variant, level, seed, loss_seed = place
            which = ", ".join(filter(None, (variant, level, f"seed {seed}", loss_seed and f"loss seed {loss_seed}")))
            what = "a report with other settings, of" if place in here else "a larger report, with"
            raise refuse("--out", out, f"holds {what} {which}; choose another folder")


def _cells(study: Study) -> dict[Place, str]:
    """Return the name of the cell in each place of ``study``."""
    found = {}
    for trial in study.trials:
        loss_seed = str(trial.cell.loss.loss_seed) if trial.level else ""
        found[trial.variant, trial.level or study.baseline, str(trial.seed), loss_seed] = trial.cell.name
    return found


def write_record(results: Results, out: Path) -> Path:
    """Write ``study.json`` into ``out``; returns it."""
    study = results.study
    # It would make this report from nothing.
    command = ["python", "-m", "megatron_lossy.lab", *(word for word in sys.argv[1:] if word != "--report-only")]
    record = {
        "title": study.title,
        "question": study.question,
        "command": shlex.join(command),
        "trained": trained(results),
        "runs": run_table(results).splitlines(),  # one line each, in the file as well
    }
    out.mkdir(parents=True, exist_ok=True)
    write_text(out / RECORD, json.dumps(record, indent=1))
    return out / RECORD


def tables(results: Results) -> dict[str, LossTable]:
    """Return all tables of a report by the names of their files."""
    found: dict[str, LossTable] = {}
    if results.study.paper:
        found["table1"] = table_1(results)
    else:
        for file, metric in _validation(results).items():
            found[file] = comparison(results, metric)
            found |= {f"{file}_{name}": table for name, table in differences(results, metric).items()}
            for name, make in (("against_best", against_best), ("won_back", won_back)):
                if (table := make(results, metric)) is not None:
                    found[f"{file}_{name}"] = table
    if weights := replica_against_owner(results):
        found["replica_against_owner"] = weights
    for names in with_predictions(results.study.metrics):
        found |= scalar_tables(results, names)
    return found


def write_tables(results: Results, found: Mapping[str, LossTable], out: Path) -> list[Path]:
    """Write the runs as CSV, and every table as CSV and Markdown; returns the files."""
    files = [out / "runs.csv"]
    write_text(files[0], run_table(results))
    for name, table in found.items():
        for suffix, text in (("csv", table.csv()), ("md", table.markdown())):
            files.append(out / f"{name}.{suffix}")
            write_text(files[-1], text)
    return files


def write_figures(results: Results, out: Path, curves: bool = True) -> list[Path]:
    """Draw every figure as PNG and PDF; returns the files. ``curves``: whether ``results`` have more than ends."""
    from .figures import plot_comparison, plot_figure_1, plot_figure_2, plot_scalar

    files: list[Path] = []
    if not results.study.paper:
        for file, metric in _validation(results).items():
            files += plot_comparison(results, metric, out / file)
    elif curves:
        files += plot_figure_1(results, out / "figure1") + plot_figure_2(results, out / "figure2")
    for names in with_predictions(results.study.metrics):
        files += plot_scalar(results, names, out / file_name(names[0]))
    return files


def _validation(results: Results) -> dict[str, str]:
    return {file_name(name): name for name in loss_metrics(results.weights) if name.startswith("val loss")}


@dataclass
class RecordedRun(Run):
    """The end of a run, from the record: without its curves."""

    ends: dict[str, float] = field(default_factory=dict)
    """Final values by the name of their column."""

    @property
    def train_loss(self) -> float:
        """The recorded training loss; NaN if it is not finite."""
        return self.ends.get("train loss", math.nan)

    def valid_loss(self, weights: str) -> float | None:
        """Return the recorded loss of the last evaluation with ``weights``; None if there was none."""
        return self.ends.get(f"val loss ({weights})", self.ends.get("val loss"))

    def scalar(self, name: str) -> float | None:
        """Return the recorded scalar ``name``; None if the run has none."""
        return self.ends.get(name)


@dataclass
class Record:
    """The content of ``study.json``: title, command and training, and of each run its place, its cell and its end."""

    title: str
    command: list[str]
    trained: str
    runs: list[tuple[Place, str, RecordedRun]]


def read_record(flag: str, folder: Path) -> Record:
    """Return the record in ``folder``, which ``flag`` names. Raise :class:`UsageError`."""
    try:
        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        rows = list(csv.DictReader(content["runs"]))
        runs = [((row["variant"], row["level"], row["seed"], row["loss seed"]), row["cell"], _end(row)) for row in rows]
        command = shlex.split(content["command"])[3:]  # after python -m megatron_lossy.lab
        record = Record(content["title"], command, content.get("trained", ""), runs)
    except (AttributeError, KeyError, OSError, TypeError, ValueError) as error:
        raise refuse(flag, folder, f"must hold a report with {RECORD} ({error})") from None
    for *_, run in runs:
        run.origin = {"trained": record.trained}
    return record


def results_of(record: Record, study: Study, folder: Path) -> Results:
    """Return the results of ``study`` in ``record``. Raise :class:`UsageError` for those of another study."""
    cells = _cells(study)
    if record.title != study.title or not {place for place, *_ in record.runs} <= cells.keys():
        raise refuse("FOLDER", folder, f"must hold the report of {study.title!r}, with runs of that study only")
    return Results(study, {cells[place]: run for place, _, run in record.runs})


def _end(row: Mapping[str, str]) -> RecordedRun:
    ends = {name: float(text) for name, text in row.items() if name not in RUN_COLUMNS and text}
    # A report of a single kind of weights does not name it: it is the one of the runs in the same report.
    kinds = [kind for kind in WEIGHTS if f"val loss ({kind})" in ends]
    return RecordedRun(row["cell"], 0.0, 0.0, None, None, {}, valid={kind: {} for kind in kinds}, ends=ends)
