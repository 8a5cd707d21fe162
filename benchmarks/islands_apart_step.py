"""What it costs that islands are launches of their own: an iteration of them, to which nothing happens, over one of islands of one launch.

    python -m benchmarks.islands_apart_step [--islands 2] [--iterations 150] [--rounds 7] [--transport pieces] [--out benchmarks/results]

Each round trains the same tiny model three times, in an order that rotates: on islands of one launch, twice, and on islands that find each
other at a lighthouse (docs/elastic.md). An iteration takes the median of those after the first fifth. Ratios are of one round; the
baseline's to itself says what they are worth.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.churn.islands import Islands
from benchmarks.churn.networks import Loopback
from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.step_overhead import AGAIN, BASELINE, ratios, spread
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.base.jobs import folder_of
from megatron_lossy.lab.environment import without_ranks
from megatron_lossy.lab.train.metrics import METRICS_FILE

_PROGRAM = "benchmarks.islands_apart_step"
APART = "launches of their own"
_FLAGS = (
    "--config configs/tiny/llama_1m.yaml --sync-method parameters --sync-fraction 0.25 --sync-delay 2 --log-interval 1"
)


def together(folder: Path, flags: Sequence[str], islands: int) -> Path:
    """Train on islands of one launch; returns the folder of the metrics."""
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(islands), "-m", "megatron_lossy.train"]
    command = [sys.executable, "-m", *run, *flags, "--metrics-dir", str(folder)]
    done = subprocess.run(command, env=without_ranks() | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"islands of one launch ended with {done.returncode}: {done.stderr[-2000:]}")
    return folder


def apart(folder: Path, flags: Sequence[str], islands: int) -> Path:
    """Train on islands that are launches of their own; returns the folder of the metrics."""
    own = ["--island-patience", "30"]
    running = Islands(Loopback(), folder, [*flags, *own])
    try:
        running.serve()
        for slot in range(islands):
            running.start(slot)
        while not running.over:
            time.sleep(0.2)
        failed = [one for one in running.lives if one.process.returncode]
        if failed:
            raise RuntimeError(f"island {failed[0].slot} ended with {failed[0].process.returncode}: {failed[0].tail()}")
    finally:
        running.end()
    return folder / "life_1"


def seconds(folder: Path) -> float:
    """The median iteration of the first island whose metrics are in ``folder``."""
    with open(Path(folder_of(folder, "island", 0)) / METRICS_FILE) as file:
        records = [json.loads(line) for line in file]
    made = [one["seconds"] for one in records if one["kind"] == "train"]
    return statistics.median(made[len(made) // 5 :])


def run(args: argparse.Namespace) -> None:
    """All rounds, and their table."""
    for name, least in (("islands", 2), ("iterations", 10), ("rounds", 1)):
        if getattr(args, name) < least:
            raise refuse(f"--{name}", getattr(args, name), f"must be at least {least}")
    flags = [*_FLAGS.split(), "--islands", str(args.islands), "--train-iters", str(args.iterations)]
    flags += ["--eval-interval", str(args.iterations), "--transport", args.transport]
    variants = {BASELINE: together, AGAIN: together, APART: apart}
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for number in range(args.rounds):
        for turn in range(len(names)):
            name = names[(number + turn) % len(names)]
            with tempfile.TemporaryDirectory() as folder:
                times[name].append(seconds(variants[name](Path(folder), flags, args.islands)))
            print(f"round {number + 1} of {args.rounds}: {name}: {times[name][-1]:.4f} s", flush=True)
    lines = ["# Islands that are launches of their own: an iteration", ""]
    lines += [f"- {line}" for line in made_with(_PROGRAM, sys.argv[1:])]
    what = f"{args.islands} islands of one rank, {args.iterations} iterations of configs/tiny/llama_1m.yaml, {args.transport}"
    lines += [
        f"- {what}; {args.rounds} rounds",
        "",
        "| variant | iteration, s | ratio (quartiles) |",
        "| --- | --- | --- |",
    ]
    for name, part in ratios(times).items():
        called = {BASELINE: "one launch", AGAIN: "one launch, again"}.get(name, name)
        lines.append(f"| {called} | {part['seconds']:.4f} | {spread(part)} |")
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    write_results(args.out, f"islands_apart_step_{args.transport}_{today()}", md=text)


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(prog=f"python -m {_PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("--islands", type=int, default=2, metavar="S", help="of a rank each (default 2)")
    parser.add_argument("--iterations", type=int, default=150, metavar="N", help="of each training (default 150)")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="a turn of each variant (default 7)")
    parser.add_argument("--transport", default="pieces", metavar="NAME", help="torch, pieces or udp (default pieces)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"for the table (default {RESULTS})")
    with usage_errors(_PROGRAM):
        run(parser.parse_args())


if __name__ == "__main__":
    main()
