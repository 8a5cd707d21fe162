"""Two hosts joined by a cable, with an engine on each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.lab import Lab
from benchmarks.lab.nodes import Node


def flood(rule: str, seconds: float, folder: Path, meanwhile: Callable[[list[Node]], None]) -> list[dict[str, int]]:
    """Let ``tests.udp_flood`` run on two hosts, and call ``meanwhile`` with them; the last line of each."""
    root = Path(__file__).parents[1]
    command = [sys.executable, "-m", "tests.udp_flood", rule, str(seconds), str(folder), "aes-128-gcm"]
    with Lab(None) as lab:
        ranks = [
            lab.start(
                rank,
                command,
                cwd=root,
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(root)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        while not all((folder / f"begun-{rank}").exists() for rank in range(2)):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        meanwhile(lab.nodes)
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]
