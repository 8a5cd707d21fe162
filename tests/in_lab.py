"""Ranks in network namespaces with an emulated link between them, for tests (benchmarks/lab)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_in_lab(module: str, *arguments: str, loss: float, sites: tuple[int, ...] = (), timeout: float = 200) -> str:
    """What ranks that run ``python -m module arguments`` print, at 4 ms; ``sites``: ranks of each, by default one."""
    where = ["--sites", *map(str, sites)] if sites else []
    command = [
        sys.executable, "-m", "benchmarks.lab", "--rtt", "4", "--loss", str(loss), *where, "--",
        "env", "GLOO_SOCKET_IFNAME=lab0", "RANK={node}", "WORLD_SIZE={nodes}", "LOCAL_RANK=0", "MASTER_ADDR={first}",
        "MASTER_PORT=29500", "OMP_NUM_THREADS=1", sys.executable, "-m", module, *arguments,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout
