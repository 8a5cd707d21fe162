"""Show what rows do on the pretended device, or write the budget of all of them.

python -m tests.impostor 'renormalize-packet.*'    rows by regular expression: stalls by line, and faults
python -m tests.impostor --all ROW                 also those that the unhooked step has
python -m tests.impostor --kernels ROW             also kernels and copies by line
python -m tests.impostor --write-budget [ROW]      writes megatron_lossy/doctor/calibration/budget.yaml, or rows of it
"""

from __future__ import annotations

import argparse
import re
from collections import Counter

from megatron_lossy.doctor.calibration.budget import FILE, Budget, Usage, read_budget, write_budget
from megatron_lossy.doctor.calibration.rows import Row, rows
from tests.ranks import RankFailed

from .build import library
from .job import STEADY, STEPS, beyond_unhooked, run, run_several
from .tracker import Findings


def show(row: Row, everything: bool, kernels: bool, got: list[tuple[Findings, float]] | None = None) -> Usage | None:
    """Print what a row does; returns what it asks for beyond the unhooked step, or None if it failed."""
    try:
        got = got or run(row)
    except RankFailed as error:
        print(f"=== {row.name}: failed\n{str(error)[-3000:]}", flush=True)
        return None
    asked = beyond_unhooked(row, got)
    print(f"=== {row.name}: loss {got[0][1]:.4f}")
    print(f"    beyond the unhooked step: {asked.kernels:g} kernels, {asked.to_device:g} bytes to and", end="")
    print(f" {asked.from_device:g} bytes from the device")
    for (place, kind), times in asked.stalls.items():
        print(f"    {times:8.2f} {kind} at {place}")
    lines: Counter[str] = Counter()
    kinds = {"synchronisation", "blocking copy", "pageable copy"} | ({"kernel", "copy"} if kernels else set())
    for count, times in got[0][0].counts.items():
        if count.phase == STEADY and count.kind in kinds and (count.place.home == "megatron_lossy" or everything):
            lines[f"{count.kind} {count.what} at {count.place}"] += times
    if kernels or everything or asked.stalls:
        print("    rank 0, by line:")
        for line, times in lines.most_common():
            print(f"    {times / STEPS:8.2f} x {line}")
    for rank, (findings, _) in enumerate(got):
        for fault in findings.faults:
            print(f"    FAULT on rank {rank}: {fault}")
    print(end="", flush=True)
    return asked


def write(names: list[str], asked: dict[str, Usage]) -> None:
    """Write the budget with ``asked``, in the order of ``names``."""
    old = read_budget() if FILE.exists() else Budget({}, {}, {})
    new = {**old.rows, **asked}
    budget = Budget({name: new[name] for name in rows() if name in new}, old.reasons, versions())
    write_budget(budget)
    print(f"wrote {FILE}")
    for place in budget.without_reason():
        print(f"needs a reason, by hand: {place}")


def versions() -> dict[str, str]:
    """The versions that counts depend on."""
    import megatron.core
    import torch

    return {"torch": torch.__version__.partition("+")[0], "megatron-core": megatron.core.__version__}


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        "python -m tests.impostor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", help="regular expressions of names; default all")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--write-budget", action="store_true")
    arguments = parser.parse_args()
    library()
    patterns = arguments.rows or [".*"]
    chosen = [row for row in rows().values() if any(re.fullmatch(pattern, row.name) for pattern in patterns)]
    got = run_several(chosen) if len(chosen) > 1 else {}
    asked = {row.name: show(row, arguments.all, arguments.kernels, got.get(row.name)) for row in chosen}
    if arguments.write_budget:
        write(list(asked), {name: usage for name, usage in asked.items() if usage is not None})


if __name__ == "__main__":
    main()
