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
from .table import FILES, loss_table, write_report


@usage_errors("megatron_lossy.report")
def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; report wrong input as one line and exit status 2."""
    sys.stdout.reconfigure(errors="replace")  # "±" on an ASCII terminal
    parser = ArgumentParser(
        "python -m megatron_lossy.report",
        description="Table of losses and training curves of a folder of runs.",
        epilog="Of many runs that answer one question python -m megatron_lossy.lab makes the report.",
    )
    folder = f"a run's folder, with {METRICS_FILE} or with the log of Megatron-LM; or a folder of such folders"
    parser.add_argument("runs", metavar="RUNS_DIR", help=folder)
    parser.add_argument("--out", metavar="DIR", help=f"folder of {', '.join(FILES)}; default RUNS_DIR")
    parser.add_argument("--overwrite", action="store_true", help="replace the report that another --out folder holds")
    hint_at_flags(parser)
    config = parser.parse_args(arguments)
    runs = read_runs(config.runs)
    out = Path(config.out if config.out is not None else config.runs)
    check_package("matplotlib", "--out", out, "matplotlib")
    check_folder("--out", out)
    # A report in the folder of its runs is renewed with them; elsewhere it may belong to other runs.
    if out.resolve() != Path(config.runs).resolve() and not config.overwrite:
        for name in FILES:
            if (out / name).exists():
                raise refuse("--out", out, f"{out / name} exists already; give another, or --overwrite")
    table = loss_table(runs)
    print(table.text())
    for file in write_report(runs, table, out):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
