"""Several equal jobs out of one launch, and the folders in which each keeps its files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

from .checkpoints import names_checkpoint


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

    def folder(self, path: str | os.PathLike[str], job: int) -> str:
        """The folder of ``job``, of real ranks, in the folder ``path`` of the run."""
        return folder_of(path, self.name, job) if self.several else os.fspath(path)

    def folder_to_load(self, path: str | os.PathLike[str], job: int) -> str:
        """The folder of the checkpoint of ``job`` if ``--load`` is ``path``.

        All jobs start from a checkpoint in ``path`` itself, until they have their own there.
        """
        own = self.folder(path, job)
        return os.fspath(path) if names_checkpoint(path) and not names_checkpoint(own) else own


def folder_of(path: str | os.PathLike[str], name: str, job: int | str) -> str:
    """The folder in ``path`` of the job with that ``name`` and number."""
    return os.path.join(path, f"{name}_{job}")


class World(Protocol):
    """The launched ranks, divided into jobs, as this rank sees them: its job is a world of its own.

    ``job``: the number of this rank's job, and how many there are. ``seed``: for what jobs do together, the same for
    all.
    """

    job: tuple[int, int]
    seed: int

    def tell_environment(self) -> None:
        """Set RANK and WORLD_SIZE to those of the job, for a program that reads them later."""

    def compare(self, settings: Mapping[str, str]) -> None:
        """``settings``, by flag, must be those of all jobs: these compare them if each is a launch of its own."""

    def open(self, init_process_group: Callable[..., Any], timeout: timedelta) -> None:
        """Make the job the default world. A collective call of all ranks of all jobs.

        ``init_process_group``: makes the default group from ``store``, ``rank``, ``world_size`` and ``timeout``.
        ``timeout``: the time after which a rank gives up on another one, in its job or not.
        """
