"""The progress of a run, its records and its end: description, first record of the metrics, writers, signals to stop."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import torch

from ...base import device
from ...config import LossyConfig
from ...run.base import Run
from ...run.exporter import exporter_at
from ..data import epochs
from ..environment import hardware, versions
from .config import TrainConfig
from .metrics import JsonLinesWriter, TensorBoardWriter, Writer
from .process import SIGNALS, told_to_end


@dataclass
class Progress:
    """The progress of a run. ``window_…`` sum up the iterations since the last log line. Saved in checkpoints."""

    iteration: int = 0
    consumed_samples: int = 0
    window_loss: float = 0.0
    window_iterations: int = 0
    window_skipped: int = 0
    window_seconds: float = 0.0

    def advance(self, samples: int) -> None:
        """Count one more iteration; :meth:`add` completes it."""
        self.iteration += 1
        self.consumed_samples += samples

    def add(self, loss: float, updated: bool) -> None:
        """Add the result of the next iteration. ``updated``: it updated the weights; the optimizer did not skip it."""
        self.window_loss += loss if updated else 0.0
        self.window_iterations += 1
        self.window_skipped += not updated

    def close_window(self) -> tuple[float, int, float]:
        """Return mean loss, skipped iterations and mean seconds of the window, and begin a new one."""
        loss = self.window_loss / max(1, self.window_iterations - self.window_skipped)
        result = loss, self.window_skipped, self.window_seconds / self.window_iterations
        self.window_loss, self.window_iterations, self.window_skipped, self.window_seconds = 0.0, 0, 0, 0.0
        return result


def open_writers(config: TrainConfig, lossy_config: LossyConfig, resumed_at: int | None, job: int = 0) -> list[Writer]:
    """Return the writers that the flags ask for, on rank 0, with the "run" record written.

    ``resumed_at``: the iteration of the checkpoint that the run continues. Records up to it are kept. ``job``: the number
    of this one, of several that are worlds of their own.
    """
    if torch.distributed.get_rank() != 0:
        return []
    folder = config.metrics_dir or config.save
    writers: list[Writer] = []
    if folder:
        writers.append(JsonLinesWriter(folder, resumed_at))
    if config.tensorboard_dir:
        writers.append(TensorBoardWriter(config.tensorboard_dir, resumed_at or 0))
    if lossy_config.metrics_port is not None and (exported := exporter_at(lossy_config.metrics_port + job)) is not None:
        writers.append(exported)
    record = {
        "kind": "run",
        "name": os.path.basename(os.path.normpath(folder or "run")),
        "p_grad": lossy_config.p_grad,
        "p_param": lossy_config.p_param,
        "loss_seed": lossy_config.loss_seed,
        "seed": config.seed,
        "config": dataclasses.asdict(config) | dataclasses.asdict(lossy_config),
        "versions": versions(),
        "device": device.device_type(),
        "hardware": hardware(),
        "date": f"{datetime.now():%Y-%m-%d}",
        "world_size": config.virtual_workers or torch.distributed.get_world_size(),
    }
    for writer in writers:
        writer.write(record)
    return writers


def header(config: TrainConfig, run: Run, data_path: Sequence[str]) -> str:
    """Return the losses, the workers, and the epochs of training data of ``run``, in words."""
    ranks, jobs = torch.distributed.get_world_size(), run.config.jobs()
    tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
    on = f", on {jobs.number} {jobs.name}s" if jobs.several else ""
    if config.virtual_workers:
        who = f"virtual workers {config.virtual_workers}, in memory{on}"
    else:
        data = run.jobs * config.data_parallel_size(ranks)
        who = f"data-parallel ranks {data}, over {torch.distributed.get_backend()}{on}"
        if jobs.several:
            who += f", of which this is number {run.job}"
        if tensor * pipeline > 1:
            who += f", tensor {tensor} x pipeline {pipeline}"
    seen = epochs(data_path, config.tokens)
    return f"loss: {run.config.describe()} | {who}, on {device.device_type()} | {seen:.3g} epochs of data"


class Stop:
    """The signals of this rank, and the agreement of all ranks of ``run`` on them. ``saves``: a checkpoint is written."""

    def __init__(self, run: Run, saves: bool) -> None:
        self._run, self._saves = run, saves
        self._number = 0

    def on_signal(self, number: int, _: Any) -> None:
        """Note a signal instead of ending the process."""
        self._number = number
        if number == signal.SIGTERM:
            told_to_end()
        if number == signal.SIGINT:
            # A second signal ends this rank at once. A second Ctrl-C at torchrun arrives as SIGTERM.
            for again in SIGNALS:
                signal.signal(again, signal.SIG_DFL)
            if torch.distributed.get_rank() == 0:
                saves = ", with a checkpoint" if self._saves else "; without --save nothing is kept"
                # The signal may have interrupted print().
                os.write(1, f"stopping after this iteration{saves}; Ctrl-C again ends at once\n".encode())

    def begin(self) -> Callable[[], int]:
        """Begin to agree whether to stop, so that all leave after the same iteration.

        Return a function that waits for the signal by which any rank was stopped, or 0.
        """
        if (agreement := self._run.job_group.begin_stopping(self._number)) is not None:
            return agreement
        stop = torch.full((1,), self._number, dtype=torch.int32, device=device.current_device())  # not copied there
        work = torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            return int(stop.item())

        return finish
