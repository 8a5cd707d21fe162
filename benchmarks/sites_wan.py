"""Two sites of two ranks with a lossy link between them: the milliseconds that the link adds to an iteration.

    python -m benchmarks.sites_wan [--fsdp2] [--mbit 100 1000] [--rtt 20 50] [--loss 0 0.001 0.01 0.03] [--rounds 3] [--out benchmarks/results]

As root, on Linux (benchmarks/lab). Four ranks in four network namespaces train a GPT of about 1 M parameters: with Megatron's own
two optimizer instances, reliably over gloo and TCP BBR; flat, as datagrams; and in two sites, over plain TCP BBR, as streams with a
deadline, and as datagrams in float32 and in int8. With --fsdp2 a transformer of as many parameters, four layers with a parameter group
each, and instead of two instances torch's mesh of two dimensions. A round starts each of them once in each cell, and the order rotates. Its first iterations do not count. Added are the
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
#: Runs of the plugin: loss flags by name.
_OURS: dict[str, dict[str, Any]] = {
    "flat, UDP": _UDP,
    "sites, TCP": {**_STREAM, "sites": 2, "udp_deadline": "off"},
    "sites, stream": {**_STREAM, "sites": 2},
    "sites, UDP": {**_UDP, "sites": 2},
    "sites, UDP, int8": {**_UDP, "sites": 2, **_CODES},
}
#: All runs, with that of Megatron or FSDP2 alone: ``None``.
MEGATRON: dict[str, dict[str, Any] | None] = {"two instances, gloo, BBR": None, **_OURS}
FSDP2: dict[str, dict[str, Any] | None] = {"two replicas, gloo, BBR": None, **_OURS}
_NODES, _SKIPPED = 4, 3
#: Of the file of numbers: no link.
_NONE = "no link"


def _megatron(flags: dict[str, Any] | None) -> Any:
    """Return a trainer of Megatron's; without ``flags`` with two optimizer instances."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from benchmarks.step_overhead import Settings, Trainer
    from megatron_lossy.config import LossyConfig

    instances = 2 if flags is None else 1
    parallel_state.initialize_model_parallel(
        create_gloo_process_groups=False, num_distributed_optimizer_instances=instances
    )
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    settings = Settings(layers=4, hidden=128, vocab=2048, sequence=64, instances=instances)
    trainer = Trainer(settings, None if flags is None else LossyConfig(**flags))
    trainer._resume()
    return trainer


def _fsdp2(flags: dict[str, Any] | None) -> Any:
    """Return a trainer of FSDP2; without ``flags`` with replicas of sites, between which torch adds gradients."""
    from torch.distributed.device_mesh import init_device_mesh

    from benchmarks.fsdp_step import Settings, Trainer

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")) if flags is None else None
    return Trainer(Settings(layers=4, hidden=128, vocab=2048, p=0.0), flags, mesh)


def rank(name: str, fsdp2: bool, mbit: float | None, steps: int, out: str) -> None:
    """Run one rank of a run: train, and write the seconds of each iteration of all ranks."""
    import torch
    import torch.distributed as dist

    from megatron_lossy.base import device

    torch.set_num_threads(1)
    device.prepare()
    device.init_process_group("gloo")
    flags = MEGATRON[name] if not fsdp2 else FSDP2[name]
    if flags is not None and mbit is not None and flags["transport"] == "udp":
        # The link is of this training alone. A rate is that of a site, or flat that of a rank.
        share = mbit if "sites" in flags else mbit / (_NODES // 2)
        flags = flags | {"udp_rate": ("dedicated", f"{share:g}mbit")}
    trainer = _fsdp2(flags) if fsdp2 else _megatron(flags)
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


def train(lab: Lab, name: str, fsdp2: bool, mbit: float | None, steps: int) -> dict[str, Any]:
    """Run on the four machines of ``lab``; return the result of the first rank."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "told.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "benchmarks.sites_wan", "--rank", name, "--result", str(out)]
        command += ["--steps", str(steps), *([] if mbit is None else ["--mbit", str(mbit)])]
        command += ["--fsdp2"] if fsdp2 else []
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
    parameters, names = kept["parameters"], _names(args)
    what = (
        f"Milliseconds that the link adds to the median iteration (in brackets: its 95th percentile over its median); "
        f"two sites of two ranks, {parameters / 1e6:.2f} M parameters, rounds of {args.steps - _SKIPPED} iterations."
    )
    lines = ["# Two sites over a lossy link", "", what, "", *(f"- {line}" for line in made_with(_PROGRAM, argv)), ""]
    lines += ["| link | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    without = {name: np.concatenate(kept["rounds"][_NONE][name]) for name in names}
    for cell in cells:
        runs, parts = kept["rounds"][cell], []
        for name in names:
            seconds = np.concatenate(runs[name])
            median, high = np.median(seconds), np.percentile(seconds, 95)
            added = "" if cell == _NONE else f"{1e3 * (median - np.median(without[name])):.0f} "
            parts.append(f"{added or f'{1e3 * median:.0f} in all '}({high / median:.2f})")
        lines.append(f"| {cell} | " + " | ".join(parts) + " |")
    return "\n".join(lines) + "\n"


_PROGRAM = "benchmarks.sites_wan"


def _names(args: argparse.Namespace) -> list[str]:
    return list(FSDP2 if args.fsdp2 else MEGATRON)


def main() -> int:
    """Run everything; or one rank, which the program starts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fsdp2", action="store_true")
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
            rank(args.rank, args.fsdp2, args.mbit[0] if len(args.mbit) == 1 else None, args.steps, args.result)
            return 0
        stem, runs = "sites_wan_fsdp2" if args.fsdp2 else "sites_wan", _names(args)
        path = Path(args.out, f"{stem}.json")
        kept = json.loads(path.read_text()) if path.exists() else {"rounds": {}}
        cells: dict[str, tuple[Link, float | None]] = {_NONE: (Link(), None)}
        for mbit, rtt, loss in itertools.product(args.mbit, args.rtt, args.loss):
            cells[f"{mbit:g} Mbit/s, {rtt:g} ms, {loss:.1%}"] = (Link(rtt / 2000, loss, None, 1e6 * mbit), mbit)
        try:
            for number in range(args.rounds):
                for cell, (link, mbit) in cells.items():
                    done = kept["rounds"].setdefault(cell, {name: [] for name in runs})
                    names = runs[number % len(runs) :] + runs[: number % len(runs)]
                    for name in [name for name in names if len(done[name]) <= number]:
                        with Lab(link, (_NODES // 2,) * 2, seed=1 + number) as lab:
                            if "bbr" in lab.nodes[0].sysctl("net.ipv4.tcp_available_congestion_control").split():
                                lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
                            told = train(lab, name, args.fsdp2, mbit, args.steps)
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
    write_results(args.out, f"{stem}_{today()}", md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
