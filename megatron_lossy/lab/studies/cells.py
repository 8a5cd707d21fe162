"""A cell of a study: one training run, known by its full configuration, in a folder of its own.

Studies share cells, and a cell runs once. Any number of processes, on any number of machines that see the folder, may
work on the same cells, if the file system has locks: each takes cells that no other has taken.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import socket
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
