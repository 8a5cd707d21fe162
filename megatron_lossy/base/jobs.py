"""Several equal jobs out of one launch, and the folders in which each keeps its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from .checkpoints import names_checkpoint
from .errors import refuse


def launched_ranks() -> int:
    """Return the number of launched ranks, at least 1. Raise :class:`UsageError` for tasks of srun without a rank."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and "WORLD_SIZE" not in os.environ:
        why = "srun started them, but RANK and WORLD_SIZE are not set, so that each would train alone; start them by "
        allowed = why + "python -m megatron_lossy.launch, or one torchrun on each node"
        raise refuse("SLURM_STEP_NUM_TASKS", tasks, allowed)
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True)
class Jobs:
    """The ``number`` of equal jobs of a run, each with data and an optimizer of its own. ``name``: what one is called.
    ``apart``: each is a launch of its own; else all are one.

    Real ranks are divided among them, and each job has folders of its own in those of the run. Virtual workers of all
    jobs are in one process, and have the folders of the run.
    """

    number: int = 1
    name: str = "job"
    apart: bool = False

    @property
    def several(self) -> bool:
        """Whether there is more than one."""
        return self.number > 1

    @property
    def launches(self) -> int:
        """The launches of the run."""
        return self.number if self.apart else 1

    @property
    def parts(self) -> int:
        """The parts of consecutive samples that a global batch is cut into, one for each job; 1: all ranks take samples in turns."""
        return 1

    def folder(self, path: str | os.PathLike[str], job: int) -> str:
        """Return the folder of ``job``, of real ranks, in the folder ``path`` of the run."""
        return folder_of(path, self.name, job) if self.several else os.fspath(path)

    def folder_to_load(self, path: str | os.PathLike[str], job: int) -> str:
        """Return the folder of the checkpoint of ``job`` if ``--load`` is ``path``.

        All jobs start from a checkpoint in ``path`` itself, until they have their own there.
        """
        own = self.folder(path, job)
        return os.fspath(path) if names_checkpoint(path) and not names_checkpoint(own) else own

    def world(self, seed: int) -> World | None:
        """Return the launched ranks divided into jobs; ``None`` with one job. Raise :class:`UsageError`.

        ``seed``: for exchanges between jobs.
        """
        return None

    def check(self, train_iters: int | None) -> None:
        """Raise :class:`UsageError` for files of flags that do not fit the exchanges between jobs.

        ``train_iters``: ``None`` if it is not known.
        """

    def advice(self, iterations: int | None) -> list[str]:
        """Return lines about flags that are allowed but rarely wanted, for a run of ``iterations``, if known."""
        return []


def folder_of(path: str | os.PathLike[str], name: str, job: int | str) -> str:
    """Return the folder in ``path`` of the job with that ``name`` and number."""
    return os.path.join(path, f"{name}_{job}")


class World(Protocol):
    """The launched ranks, divided into jobs, as this rank sees them: its job is a world of its own.

    ``job``: the number of this rank's job, and how many there are. ``launched_rank``: the number of this rank among
    those of all jobs. ``seed``: for exchanges between jobs, the same for all.
    """

    job: tuple[int, int]
    launched_rank: int
    seed: int

    def tell_environment(self) -> None:
        """Set RANK and WORLD_SIZE to those of the job, for a program that reads them later."""

    def compare(self, settings: Mapping[str, str]) -> None:
        """Compare ``settings``, by flag, between all jobs, if each is a launch of its own; they must be equal."""

    def open(self, init_process_group: Callable[..., Any], timeout: timedelta) -> None:
        """Make the job the default world. A collective call of all ranks of all jobs.

        ``init_process_group``: makes the default group from ``store``, ``rank``, ``world_size`` and ``timeout``.
        ``timeout``: the time that a rank waits for another one, in its job or not.
        """


class JobGroup:
    """The actions that this job makes together with others: none, since there is one job.

    A mechanism with several puts its own into :attr:`.Run.job_group`.
    """

    #: Adds up a tensor over all jobs, a collective call of them; ``None`` with one job.
    total: Callable[[Any], Any] | None = None

    def begin_stopping(self, signal: int) -> Callable[[], int] | None:
        """Begin to agree, at the start of an iteration, whether to stop after it.

        ``signal``: that this rank received, or 0. Return a function that waits for the signal to stop, or 0, the same
        at all ranks; ``None`` if the ranks of a job can agree by themselves. A collective call.
        """
        return None

    def catch_up(self, iteration: int) -> int:
        """Return the iteration after ``iteration`` to go on with: a later one if other jobs have gone on without this one.

        Replicas are equal then. A collective call of the ranks of this job.
        """
        return iteration

    def come_and_go(self) -> None:
        """Let jobs of this process come and go: an iteration is about to begin."""

    def consensus_weights(self) -> contextlib.AbstractContextManager[bool | None] | None:
        """Return a context with the mean weights of all jobs in the model; ``None`` with one job.

        It yields false if it has the owners' weights in the model, since the jobs do not meet.
        """
        return None

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        """Return the folder of a checkpoint of :meth:`consensus_weights` alone, for one in ``folder``, if there is any.

        With it, whether this rank writes there.
        """
        return None

    def rewind(self, folder: str) -> str | None:
        """Let all jobs go on from the same checkpoint: from that in ``folder``, or from an older one.

        Return a line to report if it is an older one. A collective call of all jobs.
        """
        return None
