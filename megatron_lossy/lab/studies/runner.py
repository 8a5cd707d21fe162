"""Runs the cells of a study: several at once, each in processes of its own, unless others work on them.

A cell that fails does not stop the others. A cell that a signal ended (out of memory, a crash) goes on from its last
checkpoint, as long as it gets further each time. So does a cell of several processes if one of them ended. Interrupted
cells save a checkpoint and continue next time.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ...base.checkpoints import latest_iteration
from ...base.device.environment import without_ranks
from ..train.metrics import METRICS_FILE, clock
from .cells import COMPLETE, DIVERGED, LOG, Cell, CellFolder

_SECONDS_BETWEEN_LINES = 20
_POLL = 0.5


@dataclass
class Tally:
    """Numbers of cells that are done and that other processes have, failures with the reason, and interruption."""

    done: int = 0
    elsewhere: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    interrupted: bool = False


@dataclass
class _Job:
    folder: CellFolder
    process: subprocess.Popen
    log: IO[bytes]
    started: float
    first: int  # number of iterations trained before
    slot: int


def run_cells(cells: Sequence[Cell], root: str | Path, jobs: int, devices: Sequence[str] = ()) -> Tally:
    """Run unfinished cells, ``jobs`` at once, in folders below ``root``. They get the ``devices`` in turn."""
    return _Runner([CellFolder(root, cell) for cell in cells], jobs, devices).run()


class _Runner:
    def __init__(self, folders: Sequence[CellFolder], jobs: int, devices: Sequence[str]) -> None:
        self._folders = folders
        self._devices = devices
        self._jobs: list[_Job] = []
        self._slots = list(range(jobs))[::-1]
        self._tally = Tally()
        self._stop = threading.Event()
        self._started = self._printed = time.monotonic()
        self._trained = 0  # iterations that finished cells trained here

    def run(self) -> Tally:
        waiting = [folder for folder in self._folders if folder.state is None]
        if not waiting:
            self._tally.done = len(self._folders)
            return self._tally
        print(f"{len(self._folders)} cells, {len(self._folders) - len(waiting)} of them done earlier", flush=True)
        with self._signals():
            try:
                self._work(waiting)
            except BaseException:
                for job in self._jobs:
                    job.process.terminate()  # nobody watches it any more
                raise
        self._tally.done = sum(folder.state is not None for folder in self._folders)
        return self._tally

    def _work(self, waiting: list[CellFolder]) -> None:
        while (waiting and not self._stop.is_set()) or self._jobs:
            while waiting and self._slots and not self._stop.is_set():
                self._start(waiting.pop(0))
            self._stop.wait(_POLL) if not self._stop.is_set() else time.sleep(_POLL)
            for job in list(self._jobs):
                if self._stop.is_set() and job.process.poll() is None:
                    job.process.terminate()  # the trainer saves and leaves
                if job.process.poll() is not None and not self._end(job):
                    waiting.insert(0, job.folder)
            self._tell(waiting)
        self._tally.interrupted = self._stop.is_set()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {name: signal.signal(name, self._on_signal) for name in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)

    def _on_signal(self, number: int, _: object) -> None:
        if not self._stop.is_set():
            print("stopping: each running cell saves a checkpoint after its iteration", flush=True)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # a second signal; the cells know already
        self._stop.set()

    # --- one cell ------------------------------------------------------------------------------------------------

    def _start(self, folder: CellFolder) -> None:
        config = folder.write_config()
        log = folder.take()
        if log is None:
            self._tally.elsewhere += 1
            return
        if folder.state is not None:  # another process finished it meanwhile
            log.close()
            return
        slot = self._slots.pop()
        process = subprocess.Popen(
            self._command(folder, config),
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=self._environment(slot),
            start_new_session=True,  # a Ctrl-C is for us; we tell the trainer to save
        )
        self._jobs.append(_Job(folder, process, log, time.monotonic(), folder.iterations, slot))

    @staticmethod
    def _command(folder: CellFolder, config: Path) -> list[str]:
        launcher = ["-m"]
        if folder.cell.processes > 1:
            count = str(folder.cell.processes)
            launcher = ["-m", "megatron_lossy.lab.launch.agent", "--standalone", "--nproc-per-node", count, "-m"]
        where = str(folder.path)
        program = ["megatron_lossy.train", "--config", str(config), "--save", where, "--load", where]
        return [sys.executable, *launcher, *program]

    def _environment(self, slot: int) -> dict[str, str]:
        environment = without_ranks()  # a batch system's ranks are ours, not the cells'
        # Cells beside each other would crawl with a thread per core each; and the sum's order shall not depend on it.
        environment.setdefault("OMP_NUM_THREADS", "1")
        if self._devices:
            device = self._devices[slot % len(self._devices)]
            environment |= {"CUDA_VISIBLE_DEVICES": device, "HABANA_VISIBLE_MODULES": device}
        return environment

    def _end(self, job: _Job) -> bool:
        """Note the end of ``job``. Returns False if its cell must be started again."""
        self._jobs.remove(job)
        self._slots.append(job.slot)
        folder, status = job.folder, job.process.returncode
        seconds = time.monotonic() - job.started
        self._trained += max(0, folder.iterations - job.first)
        try:
            if status == 0 and folder.iterations >= folder.cell.iterations:
                folder.finish(COMPLETE, seconds)
            elif status == 1 and (folder.path / METRICS_FILE).is_file() and folder.result().diverged:
                folder.finish(DIVERGED, seconds)
            elif not self._stop.is_set():
                # With several ranks the agent's status says only that one of them has ended.
                killed = _signal_name(-status) if status < 0 else "the end of a rank"
                crashed = status < 0 or folder.cell.processes > 1
                saved = (latest_iteration(folder.path) or 0) if crashed else 0
                if saved > job.first:
                    print(
                        f"cell {folder.cell.name} was ended by {killed} at iteration "
                        f"{folder.iterations}: going on from iteration {saved}",
                        flush=True,
                    )
                    return False
                self._tally.failed[folder.cell.name] = f"exit status {status}; {_last_line(folder.path / LOG)}"
                print(f"cell {folder.cell.name} failed: {self._tally.failed[folder.cell.name]}", flush=True)
        finally:
            job.log.close()  # which lets others take the cell
        return True

    # --- progress ------------------------------------------------------------------------------------------------

    def _tell(self, waiting: Sequence[CellFolder]) -> None:
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        running = [(job.folder.iterations, job.first, job.folder.cell.iterations) for job in self._jobs]
        trained = self._trained + sum(iteration - first for iteration, first, _ in running)
        left = sum(folder.cell.iterations - folder.iterations for folder in waiting)
        left += sum(total - iteration for iteration, _, total in running)
        done = sum(folder.state is not None for folder in self._folders)
        elapsed = now - self._started
        estimate = f"about {clock(elapsed / trained * left)}" if trained else "unknown time"
        positions = ", ".join(f"{iteration}/{total}" for iteration, _, total in running)
        print(
            f"{done} of {len(self._folders)} cells done, {len(running)} running (iteration {positions}), "
            f"elapsed {clock(elapsed)}, {estimate} left",
            flush=True,
        )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()} (see {log})" if lines else f"see {log}"
