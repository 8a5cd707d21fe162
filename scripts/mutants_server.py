"""Runs pytest for ``scripts/mutants.py`` in forks of a process that has imported what nearly every test needs.

Importing torch and Megatron costs more than most of the tests, twice where a test starts ranks. Each line on stdin is a
request: pytest's arguments, a file for its output and a limit in seconds. The answer is its status, null after the limit.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing.util
import os
import signal
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any


def _import() -> None:
    """Everything but the package itself, which is about to be changed."""
    import hypothesis
    import pandas
    import pyarrow.parquet
    import pytest
    import torch.distributed

    import megatron_lossy.base.device

    torch.set_num_threads(1)
    megatron_lossy.base.device.prepare_import()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import megatron.core.distributed
        import megatron.core.models.gpt
        import megatron.core.optimizer  # noqa: F401

    del hypothesis, pandas, pyarrow, pytest
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron_lossy"]:
        del sys.modules[name]


def _fork_server_in_waiting() -> Callable[..., int]:
    """A fork that will be the fork server of the ranks, and what :mod:`multiprocessing` shall start instead of an interpreter.

    It is forked before pytest begins: pytest changes streams, warnings and more, of which ranks must know nothing.
    """
    here, there = socket.socketpair()
    process = os.fork()
    if not process:
        here.close()
        text, received, _, _ = socket.recv_fds(there, 2**20, 16)
        if not text:
            os._exit(0)
        request = json.loads(text)
        there.close()
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 500) for descriptor in received]
        for descriptor in received:
            os.close(descriptor)
        for descriptor, number in zip(high, request["descriptors"]):
            os.dup2(descriptor, number)
            os.close(descriptor)
        try:
            exec(request["command"], {})
        finally:
            os._exit(0)
    there.close()
    spawn = multiprocessing.util.spawnv_passfds

    def start(path: str, args: list[Any], passed: Sequence[int]) -> int:
        if "multiprocessing.forkserver" not in args[-1]:
            return spawn(path, args, passed)
        descriptors = [*passed, 1, 2]
        request = {"command": args[-1], "descriptors": descriptors}
        socket.send_fds(here, [json.dumps(request).encode()], descriptors)
        return process

    return start


def _run(arguments: list[str], output: str) -> None:
    """pytest, in this fork."""
    os.setsid()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, source in enumerate((nothing, descriptor, descriptor)):
        os.dup2(source, number)
    multiprocessing.util.spawnv_passfds = _fork_server_in_waiting()
    import pytest

    status = 3
    try:
        status = int(pytest.main(arguments))
    finally:
        sys.stdout.flush()
        os._exit(status)


def _wait(process: int, limit: float) -> int | None:
    deadline, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(process, os.WNOHANG)
        if ended:
            status = os.waitstatus_to_exitcode(code)
        else:
            time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):  # ranks that hang are in its group
        os.killpg(process, signal.SIGKILL)
    if status is None:
        os.waitpid(process, 0)
    return status


def main() -> None:
    """Serve until stdin ends."""
    _import()
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            _run(request["arguments"], request["output"])
        print(json.dumps(_wait(process, request["limit"])), flush=True)


if __name__ == "__main__":
    main()
