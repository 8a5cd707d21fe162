"""The processes of a run: a coordinator, and islands that are launches of their own, each with any number of lives."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from benchmarks.churn.networks import Network
from megatron_lossy.lab.environment import without_ranks
from megatron_lossy.lab.train.metrics import METRICS_FILE


@dataclass
class Life:
    """One life of an island, from a start of its process on.

    ``records``: of its metrics, in their order. ``seen``: by iteration, when its record was there (seconds of :func:`time.monotonic`).
    """

    slot: int
    number: int
    process: subprocess.Popen
    log: Path
    metrics: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[int, float] = field(default_factory=dict)
    frozen: bool = False
    cut: bool = False
    _file: TextIO | None = None
    _rest: str = ""
    _all: bool = False  # it has ended, and all is read

    @property
    def runs(self) -> bool:
        """Whether its process is there."""
        return self.process.poll() is None

    @property
    def iteration(self) -> int:
        """The latest that it has made, of the run."""
        return next((record["iteration"] for record in reversed(self.records) if "iteration" in record), 0)

    @property
    def trained(self) -> list[dict[str, Any]]:
        """Its records of iterations."""
        return [record for record in self.records if record["kind"] == "train"]

    def read(self) -> None:
        """Take in the records that have come since."""
        if self._all or (self._file is None and not self.metrics.exists()):
            return
        self._all = not self.runs
        if self._file is None:
            self._file = open(self.metrics)
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        if self._all:
            self._file.close()
        for line in lines:
            record = json.loads(line)
            self.records.append(record)
            if record["kind"] == "train":
                self.seen[record["iteration"]] = time.monotonic()

    def tail(self) -> str:
        """Return the end of its output."""
        return "\n".join(self.log.read_text().splitlines()[-15:])


class Islands:
    """Islands in ``folder`` on ``network``, each with ``flags``. Their machines have the numbers of their slots."""

    def __init__(self, network: Network, folder: Path, flags: Sequence[str]) -> None:
        self._network, self._folder, self._flags = network, folder, list(flags)
        self._key = folder / "run.key"
        self.lives: list[Life] = []
        self._coordinator: subprocess.Popen | None = None
        self._environment = without_ranks() | {"OMP_NUM_THREADS": "1"}

    def serve(self) -> None:
        """Start the coordinator."""
        self._key.write_bytes(b"a secret of 32 bytes for a study ")
        options = ["--bind", self._network.coordinator, "--key-file", str(self._key), "--page", "none"]
        options += ["--journal", str(self._folder / "coordinator.journal")]
        with open(self._folder / "coordinator.txt", "a") as log:
            command = [sys.executable, "-m", "megatron_lossy", "coordinator", *options]
            self._coordinator = self._network.start(-1, command, self._environment, stdout=log, stderr=log)

    def stop_serving(self) -> None:
        """Kill the coordinator."""
        if self._coordinator is not None:
            self._coordinator.kill()
            self._coordinator.wait()
            self._coordinator = None

    def start(self, slot: int) -> Life:
        """Start the island ``slot``, from its checkpoint if it has one."""
        number = 1 + sum(life.slot == slot for life in self.lives)
        metrics, log = self._folder / f"life_{number}", self._folder / f"island_{slot}_life_{number}.txt"
        command = [sys.executable, "-m", "megatron_lossy.train", *self._flags, "--island", str(slot)]
        command += ["--rendezvous", f"tcp://{self._network.coordinator}/run", "--udp-key-file", str(self._key)]
        command += ["--metrics-dir", str(metrics)]
        with open(log, "w") as file:
            process = self._network.start(slot, command, self._environment, stdout=file, stderr=subprocess.STDOUT)
        self.lives.append(Life(slot, number, process, log, metrics / f"island_{slot}" / METRICS_FILE))
        return self.lives[-1]

    def latest(self, slot: int) -> Life:
        """Return the latest life of the island ``slot``."""
        return [life for life in self.lives if life.slot == slot][-1]

    def signal(self, slot: int, number: int) -> None:
        """Send a signal to the island ``slot``: one that kills it, freezes it, or lets it go on."""
        life = self.latest(slot)
        life.read()
        with contextlib.suppress(ProcessLookupError):
            os.kill(life.process.pid, number)
        life.frozen = number == signal.SIGSTOP
        if number == signal.SIGKILL:
            life.process.wait()

    def cut(self, slot: int, there: bool) -> None:
        """Cut the machine of the island ``slot`` off, or join it again."""
        self._network.set(slot, there)
        self.latest(slot).cut = not there

    @property
    def iteration(self) -> int:
        """The iteration of the run: the latest of those that are not cut off."""
        return max((life.iteration for life in self.lives if not life.cut), default=0)

    def read(self) -> None:
        """Take in the records that have come since."""
        for life in self.lives:
            life.read()

    def running(self) -> Iterator[Life]:
        """Yield the lives that have not ended, frozen ones too."""
        return (life for life in self.lives if life.runs)

    @property
    def over(self) -> bool:
        """Whether the islands that are not frozen have come to their end."""
        return all(life.frozen for life in self.running())

    def end(self) -> None:
        """End everything that is left."""
        for life in list(self.running()):
            life.process.kill()
            life.process.wait()
        self.stop_serving()
