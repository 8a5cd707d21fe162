"""Two sites of two ranks with a lossy link between them: the milliseconds that the link adds to an iteration.

    python -m benchmarks.sites_wan [--mbit 100 1000] [--rtt 20 50] [--loss 0 0.001 0.01 0.03] [--rounds 3] [--out benchmarks/results]

As root, on Linux (benchmarks/lab). Four ranks in four network namespaces train a GPT of about 1 M parameters: with Megatron's own
two optimizer instances, reliably over gloo and TCP BBR; flat, as datagrams; and in two sites, over plain TCP BBR, as streams with a
deadline, and as datagrams in float32 and in int8. A round starts each of them once in each cell, and the order rotates. Its first iterations do not count. Added are the
milliseconds over the same run without a link, the medians of all iterations of all ranks. The numbers are kept in
sites_wan.json of --out, and the same command continues them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, free_port, made_with, today, write_results
from benchmarks.lab import INTERFACE, Lab, Link, MissingRequirement, end_in_order, wait
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.base.files import write_text

_UDP = {"transport": "udp", "udp_interface": INTERFACE}
_STREAM = {"transport": "stream", "udp_interface": INTERFACE}
_CODES = {"grad_wire": "int8", "param_wire": "int8"}
#: By name: Megatron's optimizer instances, and loss flags; ``None`` is Megatron alone.
RUNS: dict[str, tuple[int, dict[str, Any] | None]] = {
    "two instances, gloo, BBR": (2, None),
    "flat, UDP": (1, _UDP),
    "sites, TCP": (1, {**_STREAM, "sites": 2, "udp_deadline": "off"}),
    "sites, stream": (1, {**_STREAM, "sites": 2}),
    "sites, UDP": (1, {**_UDP, "sites": 2}),
    "sites, UDP, int8": (1, {**_UDP, "sites": 2, **_CODES}),
}
_NODES, _SKIPPED = 4, 3
#: Of the file of numbers: no link.
_NONE = "no link"


def rank(name: str, mbit: float | None, steps: int, out: str) -> None:
    """Run one rank of a run: train, and write the seconds of each iteration of all ranks."""
    import torch
    import torch.distributed as dist

    from benchmarks.step_overhead import Settings, Trainer
    from megatron_lossy.base import device
    from megatron_lossy.config import LossyConfig

    torch.set_num_threads(1)
    device.prepare()
    device.init_process_group("gloo")
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    instances, flags = RUNS[name]
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, num_distributed_optimizer_instances=instances
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    if flags is not None and mbit is not None and flags["transport"] == "udp":
        # The link is of this training alone. A rate is that of a site, or flat that of a rank.
        share = mbit if "sites" in flags else mbit / (_NODES // 2)
        flags = flags | {"udp_rate": ("dedicated", f"{share:g}mbit")}
    settings = Settings(layers=4, hidden=128, vocab=2048, sequence=64, instances=instances)
    trainer = Trainer(settings, None if flags is None else LossyConfig(**flags))
    trainer._resume()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - start)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, seconds[_SKIPPED:])
    if dist.get_rank() == 0:
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        Path(out).write_text(json.dumps({"seconds": list(itertools.chain(*everyone)), "parameters": parameters}))
    if trainer.lossy is not None:
        trainer.lossy.uninstall()
    dist.barrier()
    dist.destroy_process_group()


def train(lab: Lab, name: str, mbit: float | None, steps: int) -> dict[str, Any]:
    """Run on the four machines of ``lab``; return the result of the first rank."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "told.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "benchmarks.sites_wan", "--rank", name, "--result", str(out)]
        command += ["--steps", str(steps), *([] if mbit is None else ["--mbit", str(mbit)])]
        with open(log, "w") as file:
            started = [
                lab.start(number, command, env=lab.environment(number, port), stdout=file, stderr=subprocess.STDOUT)
                for number in range(_NODES)
            ]
            status = wait(started)
        if status:
            raise RuntimeError(f"{name}: status {status}\n" + "\n".join(log.read_text().splitlines()[-15:]))
        return json.loads(out.read_text())


def table(args: argparse.Namespace, kept: dict[str, Any], cells: Iterable[str], argv: list[str]) -> str:
    """Return the result as Markdown: of each of ``cells`` the added ms, and its 95th percentile above the median."""
    parameters = kept["parameters"]
    what = (
        f"Milliseconds that the link adds to the median iteration (in brackets: its 95th percentile over its median); "
        f"two sites of two ranks, {parameters / 1e6:.2f} M parameters, rounds of {args.steps - _SKIPPED} iterations."
    )
    lines = ["# Two sites over a lossy link", "", what, "", *(f"- {line}" for line in made_with(_PROGRAM, argv)), ""]
    lines += ["| link | " + " | ".join(RUNS) + " |", "| --- |" + " --- |" * len(RUNS)]
    without = {name: np.concatenate(kept["rounds"][_NONE][name]) for name in RUNS}
    for cell in cells:
        runs, parts = kept["rounds"][cell], []
        for name in RUNS:
            seconds = np.concatenate(runs[name])
            median, high = np.median(seconds), np.percentile(seconds, 95)
            added = "" if cell == _NONE else f"{1e3 * (median - np.median(without[name])):.0f} "
            parts.append(f"{added or f'{1e3 * median:.0f} in all '}({high / median:.2f})")
        lines.append(f"| {cell} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


_PROGRAM = "benchmarks.sites_wan"


def main() -> int:
    """Run everything; or one rank, which the program starts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[100.0, 1000.0])
    parser.add_argument("--rtt", type=float, nargs="+", default=[20.0, 50.0], metavar="MS")
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.03], metavar="P")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=RESULTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with usage_errors("sites_wan"):
        if args.steps <= _SKIPPED:
            raise refuse("--steps", args.steps, f"must be above {_SKIPPED}")
        if args.rank is not None:
            rank(args.rank, args.mbit[0] if len(args.mbit) == 1 else None, args.steps, args.result)
            return 0
        path = Path(args.out, "sites_wan.json")
        kept = json.loads(path.read_text()) if path.exists() else {"rounds": {}}
        cells: dict[str, tuple[Link, float | None]] = {_NONE: (Link(), None)}
        for mbit, rtt, loss in itertools.product(args.mbit, args.rtt, args.loss):
            cells[f"{mbit:g} Mbit/s, {rtt:g} ms, {loss:.1%}"] = (Link(rtt / 2000, loss, None, 1e6 * mbit), mbit)
        try:
            for number in range(args.rounds):
                for cell, (link, mbit) in cells.items():
                    done = kept["rounds"].setdefault(cell, {name: [] for name in RUNS})
                    names = [*RUNS][number % len(RUNS) :] + [*RUNS][: number % len(RUNS)]
                    for name in [name for name in names if len(done[name]) <= number]:
                        with Lab(link, (_NODES // 2,) * 2, seed=1 + number) as lab:
                            if "bbr" in lab.nodes[0].sysctl("net.ipv4.tcp_available_congestion_control").split():
                                lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
                            told = train(lab, name, mbit, args.steps)
                        done[name].append(told["seconds"])
                        kept["parameters"] = told["parameters"]
                        path.parent.mkdir(parents=True, exist_ok=True)
                        write_text(path, json.dumps(kept))
                        print(
                            f"round {number + 1}, {cell}, {name}: {1e3 * np.median(told['seconds']):.0f} ms", flush=True
                        )
        except MissingRequirement as missing:
            print(f"sites_wan: {missing}")
            return 1
    text = table(args, kept, cells, sys.argv[1:])
    print("\n" + text)
    write_results(args.out, f"sites_wan_{today()}", md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
