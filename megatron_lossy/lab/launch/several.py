"""Jobs that are launches of their own (``--rendezvous`` without ``--island``): a command for each of them, or all of them here."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...base.errors import refuse
from ...mechanisms.islands.rendezvous.lighthouse import addresses_of, torchft
from .command import shell
from .plan import PROGRAM, Plan

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def several(plan: Plan, arguments: Sequence[str], about: Sequence[str]) -> int:
    """Print the command of the lighthouse and of each job of ``plan``, or start all here with ``--run``; returns the exit status.

    ``arguments``: the command line. ``about``: lines about the run. Raises :class:`UsageError`.
    """
    own = [one for one in arguments if one not in ("--run", "--dry-run")]
    jobs = [[sys.executable, "-m", PROGRAM, *own, "--island", str(job)] for job in range(plan.jobs.number)]
    lighthouses = [_lighthouse(url) for url in addresses_of(plan.lossy.rendezvous or "")]
    if not plan.launch.run or plan.launch.dry_run:
        print("\n".join(about))
        for command in lighthouses:
            print(f"# on the host of that address\n{shell(command, {})}")
        for job, command in enumerate(jobs):
            print(f"# {plan.jobs.name} {job}, where it is\n{shell(command, {})}")
        return 0
    if plan.launch.launcher == "srun":
        raise refuse("--run", "on", "starts all on this host; submit each with --island")
    torchft()
    plan.folder.mkdir(parents=True, exist_ok=True)
    return _run(lighthouses, jobs, plan.folder / "lighthouse.log")


def _lighthouse(url: str) -> list[str]:
    return [sys.executable, "-m", "megatron_lossy", "lighthouse", "--bind", url.removeprefix("http://")]


def _run(services: Sequence[Sequence[str]], jobs: Sequence[Sequence[str]], log: Path) -> int:
    """Run ``jobs`` to their ends, and ``services`` until then, which write into ``log``. A signal goes to all jobs.

    Returns the status of the first of these that failed, as a shell has it.
    """
    came: list[int] = []
    for number in _SIGNALS:
        signal.signal(number, lambda number, _: came.append(number))
    with open(log, "a") as file:
        serving = [subprocess.Popen(one, stdout=file, stderr=file, start_new_session=True) for one in services]
    # A session each, so that a signal of the terminal comes once, from here.
    working = [subprocess.Popen(one, start_new_session=True) for one in jobs]
    try:
        while any(one.poll() is None for one in working):
            while came:
                number = came.pop(0)
                for one in working:
                    one.send_signal(number)
            time.sleep(0.1)
    finally:
        for one in serving:
            one.terminate()
            one.wait()
    status = next((one.returncode for one in working if one.returncode), 0)
    return status if status >= 0 else 128 - status
