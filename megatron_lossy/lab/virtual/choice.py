"""The run of virtual workers, and the workers of our trainer, that the flags ask for."""

from __future__ import annotations

from typing import Any

from ...config import LossyConfig
from ..async_pipeline.workers import StageWorkers
from .base import VirtualRun
from .cluster import VirtualCluster
from .island_churn import ChurningIslands
from .island_workers import IslandWorkers
from .islands import VirtualIslands
from .replicas import VirtualReplicas


def virtual_run(config: LossyConfig, workers: int, iterations: int, seed: int, whole_optimizers: bool) -> Any:
    """Return the run of ``workers`` in one process, ``gapless``.

    ``whole_optimizers``: each worker has all of the optimizer. ``seed``: for what jobs do together.
    """
    if config.averages:
        kind = VirtualIslands if config.island_schedule is None else ChurningIslands
        return kind(config, workers, iterations, seed, gapless=True)
    cluster: type[VirtualRun] = VirtualReplicas if whole_optimizers else VirtualCluster
    return cluster(config, workers, iterations, gapless=True)


def workers_of(run: Any) -> Any:
    """Return the class of the trainer's workers in ``run``; ``None`` for :class:`.lab.train.workers.Workers`."""
    if run.config.averages and run.kind == "virtual":
        return IslandWorkers
    return StageWorkers if run.config.async_pipeline and run.kind == "Megatron" else None
