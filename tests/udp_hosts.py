"""Two hosts joined by a cable, as network namespaces, with an engine on each."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces with an interface ``lab0`` each, 10.78.0.1 and 10.78.0.2; their names."""
    names = [f"megatron-lossy-{os.getpid()}-{host}" for host in range(2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", "lab0", "netns", names[0], "type", "veth", "peer", "name", "lab0", "netns", names[1])
        for host, name in enumerate(names):
            ip("-n", name, "addr", "add", f"10.78.0.{host + 1}/24", "dev", "lab0")
            for interface in ("lo", "lab0"):
                ip("-n", name, "link", "set", interface, "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def flood(rule: str, seconds: float, folder: Path, meanwhile: Callable[[list[str]], None]) -> list[dict[str, int]]:
    """Let ``tests.udp_flood`` run on two hosts, and call ``meanwhile`` with their names; the last line of each."""
    root = Path(__file__).parents[1]
    with two_hosts() as names:
        ranks = [
            subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-m", "tests.udp_flood", rule, str(seconds), str(folder), "aes-128-gcm"],
                cwd=root,
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": str(root)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, name in enumerate(names)
        ]  # fmt: skip
        while not all((folder / f"begun-{rank}").exists() for rank in range(2)):
            assert all(rank.poll() is None for rank in ranks)
            time.sleep(0.1)
        meanwhile(names)
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), outputs
    return [json.loads(output.splitlines()[-1]) for output in outputs]
