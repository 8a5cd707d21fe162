"""``python -m megatron_lossy.report``: the table and the curves of a folder of runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import ArgumentParser, check_package, refuse, usage_errors
from ...base.files import check_folder
from ...base.flags import hint_at_flags
from ..train.metrics import METRICS_FILE
from .read import read_runs
from .scalars import DEFINITION, DEFINITION_WHOLE, axis_of, check_names, recorded
from .table import CURVES, TABLE_CSV, TABLE_MARKDOWN, loss_table, report_files, write_report


def run(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. Raise :class:`UsageError`."""
    parser = ArgumentParser(
        "python -m megatron_lossy.report",
        description="Table of losses and training curves of a folder of runs, and of their other records.",
        epilog="Of many runs that answer one question python -m megatron_lossy.lab makes the report.",
    )
    parser.add_argument(
        "runs",
        metavar="RUNS_DIR",
        help=f"a run's folder, with {METRICS_FILE} or with the log of Megatron-LM; or a folder of such folders",
    )
    files = f"{TABLE_MARKDOWN}, {TABLE_CSV} and {CURVES}"
    parser.add_argument("--out", metavar="DIR", help=f"folder of {files}; default RUNS_DIR")
    parser.add_argument(
        "--metrics",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"recorded scalars, a row of the table and a figure for each: {DEFINITION.replace('%', '%%')}; with (run) "
        f"behind a name {DEFINITION_WHOLE}",
    )
    parser.add_argument("--list-metrics", action="store_true", help="print the names for --metrics, and write nothing")
    parser.add_argument("--overwrite", action="store_true", help="replace the report that another --out folder holds")
    hint_at_flags(parser)
    config = parser.parse_args(arguments)
    runs = read_runs(config.runs)
    names = recorded(runs)
    if config.list_metrics:
        for name in names:
            having = sum(bool(run.recorded(name)) for run in runs)
            print(f"{name}: {axis_of(name).label}; in {having} of {len(runs)} runs")
        return
    check_names("--metrics", config.metrics, names)
    out = Path(config.out if config.out is not None else config.runs)
    check_package("matplotlib", "--out", out, "matplotlib")
    check_folder("--out", out)
    # A report in the folder of its runs is renewed with them; elsewhere it may belong to other runs.
    if out.resolve() != Path(config.runs).resolve() and not config.overwrite:
        for name in report_files(config.metrics):
            if (out / name).exists():
                raise refuse("--out", out, f"{out / name} exists already; give another, or --overwrite")
    table = loss_table(runs, config.metrics)
    print(table.text())
    for file in write_report(runs, table, out, config.metrics):
        print(f"wrote {file}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Call :func:`run`, and report wrong input as one line and exit status 2."""
    sys.stdout.reconfigure(errors="replace")  # "±" on an ASCII terminal
    with usage_errors("megatron_lossy.report"):
        run(arguments)


if __name__ == "__main__":
    main()
