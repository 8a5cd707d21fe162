"""Show what rows of the matrix do on the pretended device: ``python -m tests.impostor ROW ...`` (regular expressions).

--all           Megatron's and torch's own synchronisations too; without it those beyond the unhooked step
--kernels       kernels by place too
--write-budget  write what these rows (none given: all) cost into megatron_lossy/lab/calibration/budget.yaml
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time

from megatron_lossy.lab.calibration import budget
from megatron_lossy.lab.calibration.job import write_data
from megatron_lossy.lab.calibration.rows import STEPS, Row, rows
from tests.ranks import RankFailed

from .budget import as_line, write
from .build import library
from .cost import cost
from .job import Runs
from .tracker import Findings


def _loss(found: list) -> float:
    """Return the loss of the last stage."""
    return next(values.loss for values, _ in reversed(found) if values.loss is not None)


def _by_place(findings: Findings, everything: bool, kernels: bool) -> None:
    shown = {"synchronisation", "blocking copy", "pageable copy"} | ({"kernel", "copy"} if kernels else set())
    for count, n in findings.counts.most_common():
        if count.phase == "steady" and count.kind in shown and (count.place.home == "megatron_lossy" or everything):
            print(f"    {n / STEPS:7.2f} x {count.kind} {count.what} at {count.place}")


def _show(row: Row, runs: Runs, arguments: argparse.Namespace) -> tuple[budget.Cost, float] | None:
    """Run ``row`` and print what it did; its cost and its loss, if it came to its end."""
    started = time.monotonic()
    try:
        found, unhooked = runs(row), runs(row.unhooked)
    except RankFailed as error:
        print(f"=== {row.name}: FAILED\n{str(error)[-3000:]}", flush=True)
        return None
    findings = [one for _, one in found]
    beyond = cost(findings, [one for _, one in unhooked])
    print(f"{row.name} ({time.monotonic() - started:.1f} s): {as_line(beyond)}", flush=True)
    if arguments.all or arguments.kernels:
        _by_place(findings[0], arguments.all, arguments.kernels)
    for rank, one in enumerate(findings):
        for fault in one.faults:
            print(f"    rank {rank}: {fault}", flush=True)
    return beyond, _loss(found)


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--write-budget", action="store_true")
    arguments = parser.parse_args()
    if not arguments.rows and not arguments.write_budget:
        parser.error("name rows, for example 'renormalize.*'")
    library()
    known = budget.read() if budget.FILE.exists() else budget.Budget({}, {}, {})
    costs, losses = dict(known.rows), dict(known.losses)
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(write_data(folder))
        for name, row in rows().items():
            if any(re.fullmatch(pattern, name) for pattern in arguments.rows or [".*"]):
                shown = _show(row, runs, arguments)
                if shown is not None:
                    costs[name], losses[name] = shown
                if arguments.write_budget:
                    kept = [one for one in rows() if one in costs]
                    written = budget.Budget({one: costs[one] for one in kept}, losses, known.reasons)
                    write(written)


if __name__ == "__main__":
    main()
