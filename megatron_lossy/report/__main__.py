"""``python -m megatron_lossy.report``: the table and the curves of a folder of runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..config import add_flags, flag, from_namespace
from ..errors import refuse, usage_errors
from ..moved import run_as
from ..train.metrics import METRICS_FILE
from .read import read_runs
from .table import loss_table
from .writers import CURVES, TABLE_CSV, TABLE_MARKDOWN, write_report


@dataclass(frozen=True)
class ReportConfig:
    """Where the report goes."""

    out: str | None = flag(
        None, f"folder of {TABLE_MARKDOWN}, {TABLE_CSV} and {CURVES}; default RUNS_DIR", type=str, metavar="DIR"
    )
    overwrite: bool = flag(False, "replace the report that another --out folder holds already")


def run(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says. Raises :class:`UsageError`."""
    parser = argparse.ArgumentParser(
        "python -m megatron_lossy.report", description="Table of losses and training curves of a folder of runs."
    )
    parser.add_argument(
        "runs",
        metavar="RUNS_DIR",
        help=f"holds one folder per run, each with {METRICS_FILE}, or with the log or the TensorBoard files of Megatron-LM",
    )
    namespace = add_flags(parser, ReportConfig, "output").parse_args(arguments)
    config = from_namespace(ReportConfig, namespace)
    runs = read_runs(namespace.runs)
    out = Path(config.out if config.out is not None else namespace.runs)
    # A report beside its runs belongs to them and is renewed with them; elsewhere it may be that of other runs.
    if out.resolve() != Path(namespace.runs).resolve() and not config.overwrite:
        for name in (TABLE_MARKDOWN, TABLE_CSV, CURVES):
            if (out / name).exists():
                raise refuse("--out", out, f"{out / name} exists already; give another, or --overwrite")
    table = loss_table(runs)
    print(table.text())
    for file in write_report(runs, table, out):
        print(f"wrote {file}")


def main(arguments: Sequence[str] | None = None) -> None:
    """:func:`run`, with wrong input as one line and exit status 2."""
    sys.stdout.reconfigure(errors="replace")  # "±" on an ASCII terminal
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] in (["table1"], ["study"]):
        command = [] if arguments[0] == "study" else ["table1"]
        sys.argv[1:] = [*command, *arguments[1:]]
        new = " ".join(["megatron_lossy.study", *(command or ["FILE.yaml"])])
        run_as("megatron_lossy.study", f"megatron_lossy.report {arguments[0]}", new)
        return
    with usage_errors("megatron_lossy.report"):
        run(arguments)


if __name__ == "__main__":
    main()
