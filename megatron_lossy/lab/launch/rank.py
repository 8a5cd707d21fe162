"""``python -m megatron_lossy.lab.launch.rank MODULE arguments…``: one rank that srun started.

It sets the variables that torchrun would set (RANK, WORLD_SIZE, …), and becomes the program. It uses the standard
library only, because it may run in a container before any other module of ours.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Mapping, Sequence

from ...base.errors import ArgumentParser, UsageError, refuse, usage_errors
from .options import check_devices

_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}


def rank_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, from srun. Raise :class:`UsageError`."""
    if not all(name in environment for name in _SLURM.values()):
        raise UsageError("megatron_lossy.lab.launch.rank: srun did not start this process")
    found = {ours: environment[theirs] for ours, theirs in _SLURM.items()}
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", environment.get("SLURM_TASKS_PER_NODE", "1"))
    # Of each node; Slurm writes them as 8(x7),4.
    tasks = [count for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text) for _ in range(int(times or 1))]
    return found | {"LOCAL_WORLD_SIZE": tasks[int(environment.get("SLURM_NODEID", "0"))]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Become ``python -m MODULE arguments…`` as a rank."""
    parser = ArgumentParser("python -m megatron_lossy.lab.launch.rank", allow_abbrev=False)
    parser.add_argument("--kind", required=True, choices=("cuda", "hpu", "cpu"))
    parser.add_argument("--ranks", required=True, type=int)
    parser.add_argument("--master-addr", required=True)
    parser.add_argument("--master-port", required=True)
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="MODULE arguments…")
    with usage_errors("megatron_lossy.launch"):
        given = parser.parse_args(arguments)
        ours = rank_environment(os.environ)
        os.environ.update(ours, MASTER_ADDR=given.master_addr, MASTER_PORT=given.master_port)
        if int(ours["WORLD_SIZE"]) != given.ranks:
            raise refuse("--accelerators", given.ranks, f"but {ours['WORLD_SIZE']} ranks were started")
        check_devices(given.kind, int(ours["LOCAL_WORLD_SIZE"]))
        os.execv(sys.executable, [sys.executable, "-m", *given.program])


if __name__ == "__main__":
    main()
