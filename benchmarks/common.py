"""Ranks on one machine, and results written with the machine and versions: shared by all benchmarks."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import socket
import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_lossy.base import device
from megatron_lossy.base.files import write_text
from megatron_lossy.lab.environment import hardware, processor, versions
from megatron_lossy.mechanisms.islands.world import IslandWorld

RESULTS = "benchmarks/results"


def today() -> str:
    """Return the date that results bear."""
    return datetime.date.today().isoformat()


def version_list() -> str:
    """Return the versions in use, for a sentence."""
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def machine() -> str:
    """Return the name of the device that a rank computes on, for a sentence."""
    threads = f", {torch.get_num_threads()} thread(s) per rank" if device.device_type() == "cpu" else ""
    return hardware() + threads


def made_with(program: str, argv: Sequence[str]) -> list[str]:
    """Return lines about a run of ``program``, a module, on this machine: date, command, hardware, versions."""
    load = " ".join(f"{value:.1f}" for value in os.getloadavg())
    return [
        f"Date: {today()}",
        f"Command: `{shlex.join(['python', '-m', program, *argv])}`",
        f"Hardware: {processor()}, Linux {os.uname().release}; load average at the end {load}",
        f"Versions: {version_list()}",
    ]


def heading(title: str, result: dict[str, Any], what: str) -> list[str]:
    """Return the first lines of a result of :func:`run_ranks`; ``what`` was run, besides the model."""
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    model = f"{result['parameters'] / 1e6:.1f} M parameters"
    return [
        f"# {title}, {result['date']}",
        "",
        f"`{result['command'].strip()}`: {model}, {what}. {result['hardware']}. {versions}.",
        "",
    ]


def write_results(folder: str | Path, name: str, **contents: str) -> None:
    """Write ``contents``, texts by suffix, to ``folder``/``name``.suffix, replacing older ones."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for suffix, text in contents.items():
        write_text(folder / f"{name}.{suffix}", text)
    print(f"wrote {folder / name}." + ", .".join(contents))


def free_port() -> int:
    """Return a free TCP port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    ranks: int,
    run: Callable[[Any], dict],
    settings: Any,
    table: Callable[[dict], str],
    name: str,
    out: str,
    islands: int = 1,
    launches: int = 1,
) -> None:
    """Call ``run(settings)`` in so many processes; print rank 0's result as ``table``, and write it to ``out``.

    ``islands``: in which the processes are worlds of their own. ``launches``: how often to start them anew. The ``times`` of a
    result, seconds by work and variant, are joined over launches; else the last launch counts. In the result are added:
    ``date``, ``ranks``, ``launches``, ``device``, ``hardware`` and ``versions``.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(launches):
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
            path = Path(folder) / f"{number}.json"
            torch.multiprocessing.spawn(_rank, (ranks, run, settings, islands, path), nprocs=ranks)
            results.append(json.loads(path.read_text()))
    result = joined(results) | {"launches": launches}
    text = table(result)
    print("\n" + text)
    stem = f"{name}_{result['device']}_{result['date']}"
    write_results(out, stem, md=text, json=json.dumps(result, indent=1) + "\n")


def joined(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the last of ``results``, with the ``times`` of all."""
    times: dict[str, dict[str, list[float]]] = {}
    for result in results:
        for work, variants in result.get("times", {}).items():
            for name, seconds in variants.items():
                times.setdefault(work, {}).setdefault(name, []).extend(seconds)
    return results[-1] | ({"times": times} if times else {})


def _rank(rank: int, ranks: int, run: Callable, settings: Any, islands: int, path: Path) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
    device.prepare()
    if device.device_type() != "cuda":
        torch.set_num_threads(1)
    if islands == 1:
        device.init_process_group()
    else:
        IslandWorld(islands).open(device.init_process_group, timedelta(minutes=10))
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    torch.manual_seed(1)
    model_parallel_cuda_manual_seed(1)
    result = run(settings)
    result |= {
        "date": today(),
        "ranks": ranks,
        "device": device.device_type(),
        "hardware": machine(),
        "versions": versions(),
    }
    if rank == 0:
        write_text(path, json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()
