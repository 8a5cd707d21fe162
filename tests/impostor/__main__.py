"""Show what rows of the matrix do on the pretended device: ``python -m tests.impostor ROW ...`` (regular expressions).

--all      Megatron's and torch's own synchronisations too
--kernels  kernels by place too
"""

from __future__ import annotations

import argparse
import collections
import re
import tempfile
import time

from tests.ranks import RankFailed, run_ranks
from tests.trainer import TINY, write_data

from .build import library
from .job import run_row
from .rows import ROWS

STEADY = 4


def show(name: str, folder: str, everything: bool, kernels: bool) -> None:
    ranks, trainer, lossy = ROWS[name]
    settings = {
        **TINY,
        "hidden_dropout": 0.0,
        "train_iters": 7,
        "eval_iters": 0,
        "log_interval": 100,
        "micro_batch_size": 1,
        "data_path": (folder + "/train",),
        "valid_data_path": (folder + "/valid",),
        **trainer,
    }
    started = time.time()
    try:
        got = run_ranks(run_row, ranks, settings, lossy, grouped=False)
    except RankFailed as error:
        print(f"=== {name}: FAILED\n{str(error)[-3000:]}", flush=True)
        return
    print(f"=== {name} ({time.time() - started:.0f} s)", flush=True)
    one = got[0]
    total, own = collections.Counter(), collections.Counter()
    for count, n in one.counts.items():
        if count.phase == "steady":
            total[count.kind] += n
            if count.place.home == "megatron_lossy":
                own[count.kind] += n
    print("  per step:", {k: round(c / STEADY, 2) for k, c in sorted(total.items())})
    print("      ours:", {k: round(c / STEADY, 2) for k, c in sorted(own.items())})
    shown = {"synchronisation", "blocking copy", "pageable copy"} | ({"kernel", "copy"} if kernels else set())
    for count, n in one.counts.most_common():
        if count.phase == "steady" and count.kind in shown and (count.place.home == "megatron_lossy" or everything):
            print(f"    {n / STEADY:7.2f} x {count.kind} {count.what} at {count.place}")
    for rank, findings in enumerate(got):
        for fault in findings.faults:
            print(f"    rank {rank}: {fault}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", nargs="+")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    arguments = parser.parse_args()
    library()
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(write_data, 1, folder)
        for name in ROWS:
            if any(re.fullmatch(pattern, name) for pattern in arguments.rows):
                show(name, folder, arguments.all, arguments.kernels)
