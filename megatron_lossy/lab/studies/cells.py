"""A cell of a study: one training run, known by its full configuration, in a folder of its own.

Studies share cells, and a cell runs once. Any number of processes, on any number of machines that see the folder, may
work on the same cells, if the file system has locks: each takes cells that no other has taken.

A cell that fails does not stop the others. A cell that a signal ended (out of memory, a crash) goes on from its last
checkpoint, as long as it gets further each time. Interrupted cells save a checkpoint and continue next time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property
from pathlib import Path
from typing import IO, Any

import yaml

from ...base.checkpoints import TRACKER, latest_iteration
from ...base.errors import refuse
from ...base.files import write_text
from ...base.flags import incidental_fields
from ...config import LossyConfig, given
from ..environment import without_ranks
from ..report import Run
from ..report.read import read_run
from ..train.config import TrainConfig
from ..train.metrics import METRICS_FILE
from ..train.process import handling

CONFIG, STATE, LOG = "config.yaml", "cell.json", "train.log"
COMPLETE, DIVERGED = "complete", "diverged"
_SECONDS_BETWEEN_LINES = 20
_POLL = 0.5


@dataclass(frozen=True)
class Cell:
    """One training run: its two configurations."""

    train: TrainConfig
    loss: LossyConfig

    @property
    def iterations(self) -> int:
        """Iterations that the trainer counts when the run is complete."""
        return self.loss.iterations(self.train.train_iters)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that identify the run and differ from the defaults; keys are flag names without dashes."""
        # Checkpoints of a study always hold the replicas. A run that measured no drift, or no sharpness, cannot replace one that did.
        incidental = incidental_fields(TrainConfig) | incidental_fields(LossyConfig) | {"save_replicas"}
        incidental -= {"drift_interval", "sharpness_interval"}
        # This value was a default when the first folders were named, and is none with islands.
        incidental |= {"sync_method"} if self.loss.sync_method == "gradients" else set()
        return {name: value for name, value in self.all_settings().items() if name.replace("-", "_") not in incidental}

    def all_settings(self) -> dict[str, Any]:
        """Return all settings that differ from the defaults, as the ``--config`` file of the run."""
        return {
            name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for config in (self.train, self.loss)
            for name, value in given(config).items()
        }

    @cached_property
    def name(self) -> str:
        """The folder's name: a digest of the settings, and of the losses in files that they name."""
        models = [model.partition(":") for model in self.loss.loss_model]
        paths = [self.loss.trace, *(path for name, _, path in models if name == "per-link")]
        files = [_content(Path(path)) for path in paths if path]
        found = {"settings": self.settings, "processes": 1} | ({"files": files} if files else {})
        return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def _content(path: Path) -> str:
    """Return a digest of a file, or of all files in a folder. The cells of a study share it: they are read once, until they change."""
    files = [file for file in (sorted(path.rglob("*")) if path.is_dir() else [path]) if file.is_file()]
    return _digest(tuple((file, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


@cache
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for file, *_ in files:
        found.update(file.read_bytes())
    return found.hexdigest()


def make_cell(train: TrainConfig, loss: LossyConfig) -> Cell:
    """Return the cell of these configurations. Of loss flags without losses only the evaluated weights remain."""
    if loss.inert:
        loss = LossyConfig(eval_weights=loss.eval_weights)
    elif not (loss.draws() or loss.errs):
        loss = dataclasses.replace(loss, loss_seed=LossyConfig.loss_seed, save_replicas=True)
    else:
        loss = dataclasses.replace(loss, save_replicas=True)
    train = dataclasses.replace(train, save_interval=train.save_interval or -(-train.train_iters // 4))
    return Cell(train, loss)


class CellFolder:
    """The files of a cell, below ``root``."""

    def __init__(self, root: str | Path, cell: Cell) -> None:
        self.cell = cell
        self.path = Path(root) / cell.name

    @property
    def state(self) -> dict[str, Any] | None:
        """The end of the run; None while it has not ended."""
        try:
            return json.loads((self.path / STATE).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            raise refuse("--cells", self.path / STATE, "is damaged; without it the cell is trained again") from None

    @property
    def iterations(self) -> int:
        """Return the iterations trained so far, by the metrics."""
        try:
            lines = (self.path / METRICS_FILE).read_text().splitlines()
        except OSError:
            return 0
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # the last line may be unfinished
                if "iteration" in (record := json.loads(line)):
                    return int(record["iteration"])
        return 0

    def result(self) -> Run:
        """Return the run's losses. Raise :class:`UsageError` if they cannot be read."""
        run = read_run(self.path / METRICS_FILE)
        assert run is not None
        return run

    def finish(self, status: str, seconds: float) -> None:
        """Record the end of the run, and drop its checkpoints: a study needs only its losses."""
        state = {"status": status, "seconds": round(seconds, 1), "host": socket.gethostname()}
        write_text(self.path / STATE, json.dumps(state | {"settings": self.cell.settings}, indent=1))
        (self.path / TRACKER).unlink(missing_ok=True)
        for folder in self.path.glob("iter_*"):
            shutil.rmtree(folder, ignore_errors=True)

    def take(self) -> IO[bytes] | None:
        """Claim the cell. Return the log for the output of its trainers, or None while another process has the cell.

        The log is locked as long as any process has it open: trainers of a killed study keep the cell until they end.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        log = open(self.path / LOG, "ab")
        if _locked(log, fcntl.LOCK_EX):
            return log
        log.close()
        return None

    @property
    def taken(self) -> bool:
        """Whether a process has the cell."""
        try:
            with open(self.path / LOG, "rb") as log:
                return not _locked(log, fcntl.LOCK_SH)
        except FileNotFoundError:
            return False


def _locked(file: IO[bytes], how: int) -> bool:
    """Lock ``file`` unless another process has; return whether it is free. It is where the file system has no locks."""
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


@dataclass
class Tally:
    """The number of cells that other processes have, failures with the reason, and interruption."""

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


def run_cells(cells: Sequence[Cell], root: str | Path, jobs: int) -> Tally:
    """Run unfinished cells, ``jobs`` at once, in folders below ``root``."""
    return _Runner([CellFolder(root, cell) for cell in cells], jobs).run()


class _Runner:
    def __init__(self, folders: Sequence[CellFolder], most: int) -> None:
        self._folders, self._most = folders, most
        self._jobs: list[_Job] = []
        self._tally = Tally()
        self._stop = threading.Event()
        self._started = self._printed = time.monotonic()
        self._trained = 0  # iterations that finished cells trained here

    def run(self) -> Tally:
        waiting = [folder for folder in self._folders if folder.state is None]
        if not waiting:
            return self._tally
        print(f"{len(self._folders)} cells, {len(self._folders) - len(waiting)} of them done earlier", flush=True)
        with handling(self._on_signal):
            try:
                self._work(waiting)
            except BaseException:
                for job in self._jobs:
                    job.process.terminate()  # no terminal watches it any more
                raise
        return self._tally

    def _work(self, waiting: list[CellFolder]) -> None:
        while (waiting and not self._stop.is_set()) or self._jobs:
            while waiting and len(self._jobs) < self._most and not self._stop.is_set():
                self._start(waiting.pop(0))
            self._stop.wait(_POLL) if not self._stop.is_set() else time.sleep(_POLL)
            for job in list(self._jobs):
                if self._stop.is_set() and job.process.poll() is None:
                    job.process.terminate()  # the trainer saves and leaves
                if job.process.poll() is not None and not self._end(job):
                    waiting.insert(0, job.folder)
            self._print_progress(waiting)
        self._tally.interrupted = self._stop.is_set()

    def _on_signal(self, number: int, _: object) -> None:
        if not self._stop.is_set():
            print("stopping: each running cell saves a checkpoint after its iteration", flush=True)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt  # a second signal; the cells have the first
        self._stop.set()

    def _start(self, folder: CellFolder) -> None:
        folder.path.mkdir(parents=True, exist_ok=True)
        config, where = folder.path / CONFIG, str(folder.path)
        write_text(config, yaml.safe_dump(folder.cell.all_settings(), sort_keys=False))
        if (log := folder.take()) is None:
            self._tally.elsewhere += 1
            return
        if folder.state is not None:  # another process finished it meanwhile
            log.close()
            return
        program = ["megatron_lossy.train", "--config", str(config), "--save", where, "--load", where]
        process = subprocess.Popen(
            [sys.executable, "-m", *program],
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            # A batch system's ranks are ours, not the cells'. Cells at the same time would crawl with a thread per core
            # each; and the sum's order shall not depend on it.
            env={"OMP_NUM_THREADS": "1", **without_ranks()},
            start_new_session=True,  # a Ctrl-C is for us; we ask the trainer to save
        )
        self._jobs.append(_Job(folder, process, log, time.monotonic(), folder.iterations))

    def _end(self, job: _Job) -> bool:
        """Note the end of ``job``. Return False if its cell must be started again."""
        self._jobs.remove(job)
        folder, status = job.folder, job.process.returncode
        seconds = time.monotonic() - job.started
        self._trained += max(0, folder.iterations - job.first)
        try:
            if status == 0 and folder.iterations >= folder.cell.iterations:
                folder.finish(COMPLETE, seconds)
            elif status == 1 and (folder.path / METRICS_FILE).is_file() and folder.result().diverged:
                folder.finish(DIVERGED, seconds)
            elif not self._stop.is_set():
                saved = (latest_iteration(folder.path) or 0) if status < 0 else 0
                if saved > job.first:
                    ended = f"was ended by {signal.Signals(-status).name} at iteration {folder.iterations}"
                    print(f"cell {folder.cell.name} {ended}: going on from iteration {saved}", flush=True)
                    return False
                log = folder.path / LOG
                lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
                why = f"exit status {status}; " + (f"{lines[-1]} (see {log})" if lines else f"see {log}")
                self._tally.failed[folder.cell.name] = why
                print(f"cell {folder.cell.name} failed: {why}", flush=True)
        finally:
            job.log.close()  # which lets others take the cell
        return True

    def _print_progress(self, waiting: Sequence[CellFolder]) -> None:
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
        estimate = f"about {timedelta(seconds=round(elapsed / trained * left))}" if trained else "unknown time"
        positions = ", ".join(f"{iteration}/{total}" for iteration, _, total in running)
        cells = f"{done} of {len(self._folders)} cells done, {len(running)} running (iteration {positions})"
        print(f"{cells}, elapsed {timedelta(seconds=round(elapsed))}, {estimate} left", flush=True)
