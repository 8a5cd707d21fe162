"""Predictions of ``python -m megatron_lossy plan`` against trainings over emulated links.

    python -m benchmarks.plan_check [--links 0 1 …] [--out runs/plan_check]

As root, on Linux (benchmarks/lab), on a machine that does nothing else: 25 minutes on 2 cores. Two ranks, a site each, train a tiny
model over each of twelve links by each of four ways, and once with nothing exchanged, which is the step that the plan is given. Each
cell is a file: the same command goes on where it was, and begins those again that failed. The last table has the constants of
megatron_lossy/lab/plan/measured.yaml by these cells.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import free_port, made_with
from benchmarks.lab import INTERFACE, Lab, Link, MissingRequirement, end_in_order, wait
from benchmarks.run_wan import metrics_file
from megatron_lossy.base.errors import usage_errors
from megatron_lossy.base.files import write_text
from megatron_lossy.lab.launch.recipe import Recipe, flag_arguments, read_recipe
from megatron_lossy.lab.plan.advice import Option, advise
from megatron_lossy.lab.plan.link import Link as Planned
from megatron_lossy.lab.plan.ways import Way

#: Mbit/s, round trip in ms, share of packets lost.
LINKS = (
    *((20, 20, 0), (20, 100, 0.01), (50, 20, 0.01), (50, 50, 0.05), (100, 20, 0), (100, 50, 0.01)),
    *((100, 100, 0.1), (200, 20, 0.01), (200, 50, 0), (400, 20, 0.01), (400, 100, 0.01), (800, 20, 0.1)),
)
#: Method, transport, values, and iterations between exchanges.
WAYS = (
    ("gradients", "udp", "raw", 1),
    ("sites", "stream", "int8", 1),
    ("islands", "udp", "bf16", 1),
    ("diloco", "udp", "fp32", 20),
)
_ALONE = ("nothing", None, "raw", 1)
_CONFIG = "configs/tiny/llama_1m.yaml"
#: The first iterations of a training do not count, nor those up to the second exchange where few exchange.
_WARM, _COUNTED = 8, 20
_OWN = ("--log-interval", "1", "--eval-iters", "0", "--lr-warmup-iters", "1")


def train(lab: Lab, flags: Sequence[str], every: int, folder: Path) -> list[float]:
    """Train over the link of ``lab``, with an exchange in one of ``every`` iterations; return the seconds of the counted ones."""
    shutil.rmtree(folder, ignore_errors=True)  # of a training that did not end
    folder.mkdir(parents=True)
    counted = max(_COUNTED, 2 * every)
    command = [sys.executable, "-m", "megatron_lossy.train", "--config", _CONFIG, *_OWN, *flags]
    command += ["--train-iters", str(counted + max(_WARM, every)), "--metrics-dir", str(folder)]
    port = free_port()
    with open(folder / "log.txt", "w") as log:
        output = {"stdout": log, "stderr": subprocess.STDOUT}
        ranks = [lab.start(rank, command, env=lab.environment(rank, port), **output) for rank in range(2)]
        if status := wait(ranks):
            raise RuntimeError(f"status {status}; see {folder / 'log.txt'}")
    records = map(json.loads, metrics_file(folder).read_text().splitlines())
    return [record["seconds"] for record in records if record["kind"] == "train"][-counted:]


def cell(lab: Lab, name: str, options: Sequence[Option], kind: tuple, out: Path) -> dict:
    """Return the prediction and measurement of a way, the second from its file if there; with few exchanges the mean counts."""
    file = out / f"{name}.json"
    option = {_kind(option.found.way): option for option in options}[kind]
    found = option.found
    if not file.exists():
        settings = {**option.settings, "save-replicas": False}
        print(f"{name}: {found.name} …", flush=True)
        interface = ["--udp-interface", INTERFACE] if found.way.transport is not None else []
        times = train(lab, [*flag_arguments(settings, "plan"), *interface], found.interval, out / name)
        measured = statistics.mean(times) if found.interval > 1 else statistics.median(times)
        what = {"way": found.name, "transport": found.way.transport, "sent": found.sent, "every": found.interval}
        write_text(file, json.dumps(what | {"measured": measured}) + "\n")
    return {"predicted": found.seconds, **json.loads(file.read_text())}


def _kind(way: Way) -> tuple:
    return (way.method, way.transport, way.values, way.every) if not way.later else ()


def link_cells(number: int, recipe: Recipe, out: Path) -> list[dict]:
    """Return the cells of all ways over the link of that number; print a line about each that fails."""
    mbit, trip, loss = LINKS[number]
    link, cells = Planned(mbit, trip / 1e3, loss), []
    with Lab(Link(trip / 2000, loss, rate=mbit * 1e6, queue=mbit * 1e6 / 8 * 0.02)) as lab:
        lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
        alone = cell(lab, f"{number}_alone", advise(link, recipe, (1.0,) * 3, 2, None).options, _ALONE, out)
        options = advise(link, recipe, (alone["measured"],) * 3, 2, None).options
        for kind in WAYS:
            try:
                cells.append({"alone": alone["measured"], **cell(lab, f"{number}_{kind[0]}", options, kind, out)})
            except RuntimeError as failed:
                print(f"{number}_{kind[0]}: {failed}", flush=True)
    return cells


def constants(cells: Sequence[tuple[int, dict]]) -> list[str]:
    """Return a table of the constants of the plan by ``cells``.

    They are the share of a link that a transport used, by the share of lost packets, where gradients and sites make an iteration
    a fifth longer at least; and an iteration of islands over one that exchanges nothing.
    """
    shares: dict[tuple[str, float], list[float]] = {}
    for number, found in cells:
        mbit, trip, loss = LINKS[number]
        added = found["measured"] - found["alone"] - 2 * trip / 1e3
        if found["way"].startswith(("gradients", "sites")) and added > 0.2 * found["alone"]:
            shares.setdefault((found["transport"], loss), []).append(found["sent"] / added / (mbit * 1e6 / 8))
    beside = [found["measured"] / found["alone"] for _, found in cells if found["way"].startswith("islands")]
    rows = [
        *(f"| {over}, {100 * loss:g} % lost | {spread(found)} |" for (over, loss), found in sorted(shares.items())),
        *([f"| islands over alone | {spread(beside)} |"] if beside else []),
    ]
    return ["| constant | least to most (median; cells) |", "| --- | --- |", *rows]


def spread(values: Sequence[float]) -> str:
    """Return the least of ``values`` to the most, their median and number."""
    return f"{min(values):.3f} to {max(values):.3f} ({statistics.median(values):.3f}; {len(values)})"


def row(number: int, found: dict) -> str:
    """Return a cell as a line of the table."""
    mbit, trip, loss = LINKS[number]
    low, usual, high, measured = (1e3 * seconds for seconds in (*found["predicted"], found["measured"]))
    times = f"{usual:.0f} ({low:.0f} to {high:.0f}) | {measured:.0f} | {100 * (usual / measured - 1):+.0f} %"
    return f"| {mbit} Mbit/s, {trip} ms, {100 * loss:g} % | {found['way']} | {times} |"


def main() -> None:
    """Run the program."""
    parser = argparse.ArgumentParser("python -m benchmarks.plan_check", description=__doc__.splitlines()[0])
    every = range(len(LINKS))
    parser.add_argument(
        "--links", type=int, nargs="+", choices=every, default=list(every), metavar="I", help="default all"
    )
    parser.add_argument("--out", default="runs/plan_check", metavar="FOLDER", help="default runs/plan_check")
    args = parser.parse_args()
    recipe = read_recipe(_CONFIG)
    recipe.launch.update({"accelerators": 2, "device": "cpu"})
    cells = [(number, found) for number in args.links for found in link_cells(number, recipe, Path(args.out))]
    off = [abs(found["predicted"][1] / found["measured"] - 1) for _, found in cells]
    near = [sum(share <= limit for share in off) for limit in (0.15, 0.3)]
    lines = [
        "# Predicted and measured times of an iteration",
        "",
        *made_with("benchmarks.plan_check", sys.argv[1:]),
        "",
    ]
    lines += ["| link | way | predicted (ms) | measured (ms) | off |", "| --- | --- | --- | --- | --- |"]
    lines += [row(*cell) for cell in cells]
    lines += [
        "",
        f"Of {len(off)} cells {near[0]} are within 15 %, and {near[1]} within 30 %.",
        "",
        *constants(cells),
        "",
    ]
    text = "\n".join(lines)
    write_text(Path(args.out) / "plan_check.md", text)
    print(text)


if __name__ == "__main__":
    end_in_order()
    with usage_errors("benchmarks.plan_check"):
        try:
            main()
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
