"""Command lines that one process runs one after the other: for refusals, of which each would else cost a program.

Each runs as ``python -m MODULE`` does: the module's own ``__main__``, command line, streams and exit status. Afterwards the
process is as it was: folder, environment, signals, warnings and process groups. A module that is imported stays so.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import warnings
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

from tests.programs import ROOT, run_main
from tests.ranks import context


def _as_before(before: dict[str, Any]) -> None:
    """Undo what the last command line may have changed."""
    os.chdir(before["folder"])
    os.environ.clear()
    os.environ.update(before["environment"])
    sys.path[:] = before["path"]
    for number, handler in before["signals"].items():
        signal.signal(number, handler)
    parallel_state = sys.modules.get("megatron.core.parallel_state")
    distributed = sys.modules["torch"].distributed
    if distributed.is_initialized():
        if parallel_state is not None:
            parallel_state.destroy_model_parallel()
        distributed.destroy_process_group()


def _serve(connection) -> None:
    really_end = os._exit
    os._exit = sys.exit  # as errors.py ends a program
    sys.path.insert(0, os.getcwd())
    before = {
        "folder": os.getcwd(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "signals": {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE)},
    }
    while True:
        try:
            module, words, folder, environment = connection.recv()
        except EOFError:
            really_end(0)
        with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
            os.chdir(folder)
            os.environ.update(environment)
            os.dup2(stdout.fileno(), 1)
            os.dup2(stderr.fileno(), 2)
            with warnings.catch_warnings():
                status = run_main(module, words)
            sys.stdout.flush()
            sys.stderr.flush()
            _as_before(before)
            connection.send((status, Path(stdout.name).read_text(), Path(stderr.name).read_text()))


class Rows:
    """The process. It starts with the first command line; one that ends or hangs is replaced by another."""

    def __init__(self) -> None:
        self._process: Any = None

    def run(
        self, module: str, *arguments: object, folder: Path = ROOT, timeout: float = 60, **environment: object
    ) -> CompletedProcess[str]:
        """Run ``python -m module arguments`` in ``folder``. ``environment``: variables besides those of the process."""
        if self._process is None:
            self._connection, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        words = [str(argument) for argument in arguments]
        try:
            self._connection.send((module, words, folder, {name: str(value) for name, value in environment.items()}))
            assert self._connection.poll(timeout), f"{module} {' '.join(words)} does not end within {timeout} s"
            return CompletedProcess([module, *words], *self._connection.recv())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None
