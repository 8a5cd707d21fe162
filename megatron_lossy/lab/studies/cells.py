"""A cell of a study: one training run, known by its full configuration, in a folder of its own.

Studies share cells, and a cell runs once. Any number of processes, on any number of machines that see the folder, may
work on the same cells: each takes cells that no other has taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import socket
import uuid
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import yaml

from ...base.checkpoints import TRACKER
from ...base.errors import refuse
from ...base.files import write_text
from ...base.flags import incidental_fields
from ...config import LossyConfig, given
from ..report import Run
from ..report.columns import NETWORK
from ..report.read import read_run
from ..train.config import TrainConfig
from ..train.metrics import METRICS_FILE

CONFIG, STATE, LOG = "config.yaml", "cell.json", "train.log"
COMPLETE, DIVERGED = "complete", "diverged"
#: Seconds between two signs of life of a cell's holder, and seconds without one until the cell is taken over.
HEARTBEAT, ABANDONED = 15, 180


@dataclass(frozen=True)
class Cell:
    """One training run: its two configurations, and its number of processes."""

    train: TrainConfig
    loss: LossyConfig
    processes: int = 1

    @property
    def iterations(self) -> int:
        """Iterations that the trainer counts when the run is complete."""
        return self.loss.iterations(self.train.train_iters)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that identify the run and differ from the defaults; keys are flag names without dashes."""
        # Checkpoints of a study always hold the replicas. A run that measured no drift, or no sharpness, cannot replace one that did.
        # Nor can a run that sent slower, or with less parity, replace one that lost more.
        incidental = incidental_fields(TrainConfig) | incidental_fields(LossyConfig) | {"save_replicas"}
        incidental -= {"drift_interval", "sharpness_interval", *NETWORK}
        # This value was a default when the first folders were named, and is none with islands.
        incidental |= {"sync_method"} if self.loss.sync_method == "gradients" else set()
        return {name: value for name, value in self.all_settings().items() if name.replace("-", "_") not in incidental}

    def all_settings(self) -> dict[str, Any]:
        """All settings that differ from the defaults, as the ``--config`` file of the run."""
        return {
            name.replace("_", "-"): list(value) if isinstance(value, tuple) else value
            for config in (self.train, self.loss)
            for name, value in given(config).items()
        }

    @cached_property
    def name(self) -> str:
        """The folder's name: a digest of the settings."""
        text = json.dumps({"settings": self.settings, "processes": self.processes}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_cell(train: TrainConfig, loss: LossyConfig, processes: int = 1) -> Cell:
    """The cell of these configurations. If they lose nothing, of the loss flags only the evaluated weights remain."""
    if loss.inert:
        loss = LossyConfig(eval_weights=loss.eval_weights)
    elif not (loss.draws() or loss.errs):
        loss = dataclasses.replace(loss, loss_seed=LossyConfig.loss_seed, save_replicas=True)
    else:
        loss = dataclasses.replace(loss, save_replicas=True)
    train = dataclasses.replace(train, save_interval=train.save_interval or -(-train.train_iters // 4))
    return Cell(train, loss, processes)


class CellFolder:
    """The files of a cell, below ``root``."""

    def __init__(self, root: str | Path, cell: Cell) -> None:
        self.cell = cell
        self.path = Path(root) / cell.name
        self._lock = Path(root) / f"{cell.name}.lock"
        self._claim: str | None = None  # the content of the lock if this object made it

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
        """Iterations trained so far, as far as the metrics tell."""
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
        """The run's losses. Raises :class:`UsageError` if they cannot be read."""
        run = read_run(self.path / METRICS_FILE)
        assert run is not None
        return run

    def write_config(self) -> Path:
        """The cell's settings as a file for ``--config``."""
        self.path.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(self.cell.all_settings(), sort_keys=False)
        write_text(self.path / CONFIG, text)
        return self.path / CONFIG

    def open_log(self) -> IO[bytes] | None:
        """The file for the output of trainers; ``None`` while trainers of a killed study still run in this folder.

        It is locked as long as any process has it open, and so also by such trainers.
        """
        log = open(self.path / LOG, "ab")
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.close()
            return None
        except OSError:  # the file system has no locks
            pass
        return log

    def finish(self, status: str, seconds: float, **facts: Any) -> None:
        """Record that the run is over, and drop its checkpoints: a study needs only its losses."""
        state = {
            "status": status,
            "seconds": round(seconds, 1),
            "host": socket.gethostname(),
            "processes": self.cell.processes,
            "settings": self.cell.settings,
            **facts,
        }
        write_text(self.path / STATE, json.dumps(state, indent=1))
        (self.path / TRACKER).unlink(missing_ok=True)
        for folder in self.path.glob("iter_*"):
            shutil.rmtree(folder, ignore_errors=True)

    # --- who works on it -----------------------------------------------------------------------------------------

    def take(self) -> bool:
        """Claim the cell; false if another process has it. Call :meth:`keep` at intervals, and :meth:`release` last."""
        self._lock.parent.mkdir(parents=True, exist_ok=True)
        if self._create():
            return True
        if (abandoned := self._abandoned()) is None:
            return False
        aside = self._lock.with_suffix(f".{uuid.uuid4().hex}")
        try:
            os.rename(self._lock, aside)
        except FileNotFoundError:  # another process found it abandoned, too
            return False
        mine = _read(aside) == abandoned
        if not mine:  # another process was quicker, or the holder is alive after all
            with contextlib.suppress(FileExistsError):
                os.link(aside, self._lock)
        aside.unlink()
        return mine and self._create()

    def keep(self) -> None:
        """Give a sign of life for the cell's holder, unless another process took the cell over."""
        with contextlib.suppress(FileNotFoundError):
            if self._held():
                os.utime(self._lock)

    def release(self) -> None:
        """Let others take the cell, unless one took it over already."""
        with contextlib.suppress(FileNotFoundError):
            if self._held():
                self._lock.unlink()

    def holder(self) -> str | None:
        """The holder of the cell, as host and process."""
        try:
            return self._lock.read_text().rpartition(" ")[2] or None
        except FileNotFoundError:
            return None

    def _held(self) -> bool:
        """Whether the lock has the content that :meth:`take` wrote."""
        return self._lock.read_text() == self._claim

    def _create(self) -> bool:
        claim = f"{uuid.uuid4().hex} {socket.gethostname()}:{os.getpid()}"
        try:
            with open(self._lock, "x") as file:
                file.write(claim)
        except FileExistsError:
            return False
        except OSError:
            self._lock.unlink(missing_ok=True)  # an incomplete lock names no holder
            raise
        self._claim = claim
        return True

    def _abandoned(self) -> tuple[str, float] | None:
        """The lock's text and time if its writer gives no sign of life; else None."""
        try:
            text, sign = _read(self._lock)
        except FileNotFoundError:
            return None
        # The file system's own clock decides: clocks of two machines may differ.
        probe = self._lock.with_suffix(f".{uuid.uuid4().hex}")
        probe.touch()
        silence = probe.stat().st_mtime - sign
        probe.unlink()
        host, _, process = text.rpartition(" ")[2].rpartition(":")
        dead = host == socket.gethostname() and Path("/proc/self").exists() and not Path(f"/proc/{process}").exists()
        return (text, sign) if silence > (2 * HEARTBEAT if dead else ABANDONED) else None


def _read(lock: Path) -> tuple[str, float]:
    """Text and time of a lock."""
    return lock.read_text(), lock.stat().st_mtime
