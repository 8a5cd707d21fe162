"""``python -m MODULE`` in a process that the fork server of :mod:`tests.ranks` starts.

It is a process of its own: command line, folder, environment, streams, signals and exit status are those of a program
that was started afresh. Only the imports of torch and megatron-core, five seconds of a core, are the server's. Their
output is therefore not in its own. torchrun, too, forks its ranks: agent, store, restarts and error files are its
own. Every program has a test that starts it afresh, too.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from tests.ranks import context
from tests.slurm_cluster import free_ports

ROOT = Path(__file__).parents[1]
#: Programs that start ranks: torchrun, and the launcher's agent in its place.
TORCHRUN, AGENT = "torch.distributed.run", "megatron_lossy.lab.launch.agent"


def run_main(program: str, arguments: Sequence[str]) -> int:
    """Run ``python -m program arguments``, or ``python program arguments`` of a file, in this process. Return its exit status."""
    sys.argv = [program, *arguments]
    try:
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _become(program: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run the program as :func:`run_main` does, in this process, which ends with it."""
    os.environ.clear()
    os.environ.update(environment)
    sys.path.insert(0, os.path.dirname(program) if program.endswith(".py") else os.getcwd())
    status = run_main(program, arguments)
    # The interpreter's own end, which a fork does not reach.
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _write_to(stdout: int, stderr: int) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)


def _program(module, arguments, folder, environment, *streams):
    _write_to(*(os.open(path, os.O_WRONLY | os.O_APPEND) for path in streams))
    os.chdir(folder)
    if module == "megatron_lossy.lab":
        _fork_cells()
    elif module in (TORCHRUN, AGENT):
        _fork_ranks()
    _become(module, arguments, environment)


def _fork_cells() -> None:
    """Let a study fork its trainers, where it would start them with the same command line."""
    from megatron_lossy.lab.studies import cells

    def start(command, *, stdout, stderr, stdin, env, start_new_session):
        assert (stderr, stdin) == (subprocess.STDOUT, subprocess.DEVNULL) and start_new_session
        return _Forked(command, env, stdout, stdout)

    cells.subprocess = types.SimpleNamespace(Popen=start, STDOUT=subprocess.STDOUT, DEVNULL=subprocess.DEVNULL)


def _fork_ranks() -> None:
    """Let torchrun's agent, which this process becomes, fork its ranks."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler import SubprocessHandler

    SubprocessHandler._popen = lambda handler, command, environment: _Forked(
        command, environment, handler._stdout or sys.stdout, handler._stderr or sys.stderr
    )


class _Forked:
    """The part of :class:`subprocess.Popen` that a study and torchrun's agent use, for a command of Python.

    The new process leads a session of its own.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], stdout: IO, stderr: IO) -> None:
        python, *words = command
        assert python == sys.executable
        while words[0] in ("-u", "-m"):
            del words[0]
        program, *arguments = words
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if not self.pid:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            _write_to(stdout.fileno(), stderr.fileno())
            _become(program, arguments, environment)
        while self.poll() is None and os.getsid(self.pid) != self.pid:  # the caller may end the session at once
            time.sleep(0.001)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


class Program:
    """``python -m module arguments`` in ``folder``, running. Used like :class:`subprocess.Popen` with text.

    ``merged``: errors go where the output goes. ``environment``: variables besides those of this process.
    """

    def __init__(
        self, module: str, *arguments: object, folder: Path = ROOT, merged: bool = False, **environment: object
    ) -> None:
        self._output = tempfile.TemporaryDirectory()
        self._files = [Path(self._output.name, name) for name in ("stdout", "stdout" if merged else "stderr")]
        values = os.environ | {"OMP_NUM_THREADS": "1"} | {name: str(value) for name, value in environment.items()}
        words = [str(argument) for argument in arguments]
        for file in self._files:
            file.touch()
        self._process = context.Process(
            target=_program, args=(module, words, str(folder), values, *map(str, self._files)), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> bool:
        """Return whether it was still there: the fork server may have reaped it before this process sees its end."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True

    def printed(self) -> str:
        """Return its output so far."""
        return self._files[0].read_text()

    def communicate(self, timeout: float = 120) -> tuple[str, str]:
        """Wait for the end; what was printed and what was said to be wrong. It is killed after ``timeout`` seconds."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        return tuple(file.read_text() for file in self._files)


def until(condition: Callable[[], object], *running: Any, seconds: float = 60) -> None:
    """Wait for ``condition``, while all programs of ``running`` go on."""
    deadline = time.monotonic() + seconds
    while not condition():
        for program in running:
            assert program.poll() is None, program.communicate()
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def rank_environments(ranks: int) -> list[dict[str, object]]:
    """Return the environment that torchrun gives to each of ``ranks`` on one node."""
    world = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0]}
    return [{**world, **meeting, "RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]


def start_ranks(module: str, *arguments: object, ranks: int, **how: object) -> list[Program]:
    """Start ``python -m module arguments`` as torchrun does on one node, ``ranks`` times."""
    return [Program(module, *arguments, **environment, **how) for environment in rank_environments(ranks)]


def run_program(module: str, *arguments: object, ranks: int = 0, **how: object) -> subprocess.CompletedProcess:
    """Run ``python -m module arguments`` to its end, with ``ranks`` as torchrun starts them on one node."""
    programs = start_ranks(module, *arguments, ranks=ranks, **how) if ranks else [Program(module, *arguments, **how)]
    until(lambda: any(one.poll() for one in programs) or all(one.poll() == 0 for one in programs), seconds=120)
    failed = next((program for program in programs if program.poll()), programs[0])
    for program in programs:
        if program.poll() is None:
            program.send_signal(signal.SIGTERM)
    outputs = [program.communicate() for program in programs]
    stdout, stderr = ("".join(texts) for texts in zip(*outputs))
    return subprocess.CompletedProcess([module, *arguments], failed.returncode, stdout, stderr)
