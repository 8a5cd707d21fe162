"""The twins of mechanisms: their runs of virtual workers, their parts in these, and their workers in our trainer.

A mechanism does not name its twin. This table does, as text: the modules of twins import the virtual runs.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ...base.registry import MECHANISMS
from ...config import LossyConfig
from .sending import Sending

if TYPE_CHECKING:
    from ...run.base import Run
    from ...transport import LossyGroup


def _load(twin: str) -> Any:
    """Return the class or function at ``module:name`` in the folder of mechanisms."""
    module, _, name = twin.partition(":")
    return getattr(importlib.import_module(f"megatron_lossy.mechanisms.{module}"), name)


def run_of(config: LossyConfig, workers: int, iterations: int, seed: int, whole_optimizers: bool) -> Run | None:
    """Return the run of ``workers`` in one process, ``gapless``; ``None`` for a :class:`.VirtualCluster`.

    ``whole_optimizers``: each worker has all of the optimizer. ``seed``: for what jobs do together.
    """
    run: Run | None = None
    if config.averages:
        twin = "islands.virtual:VirtualIslands"
        if config.island_schedule is not None:
            replays = config.replays_islands
            twin = "islands.virtual_replay:ReplayedIslands" if replays else "islands.virtual_churn:ChurningIslands"
        run = _load(twin)(config, workers, iterations, seed, gapless=True)
    elif whole_optimizers:
        run = _load("replicas.virtual:VirtualReplicas")(config, workers, iterations, gapless=True)
    return run


def attach(run: Any) -> None:
    """Attach mechanisms to ``run``, of virtual workers."""
    if run.config.loses_at_boundaries:
        _load("boundaries.part:attach_virtual")(run)
    if (run.config.virtual_stages or 1) > 1:
        run.add_part(_load("async_pipeline.virtual:Stages")(run.config.virtual_stages))
    MECHANISMS.attach(run)


def workers_of(run: Any) -> Any:
    """Return the class of the trainer's workers in ``run``; ``None`` for :class:`.lab.train.workers.Workers`."""
    if run.config.averages and run.kind == "virtual":
        return _load("islands.workers:IslandWorkers")
    if run.config.async_pipeline and run.kind == "Megatron":
        return _load("async_pipeline.workers:StageWorkers")
    return None


def sending_of(groups: Sequence[LossyGroup], buckets: Sequence[Any], optimizers: Callable[[], list[Any]]) -> Sending:
    """Return the values that the owners of a stream send.

    ``groups``: one for every worker. ``buckets``: Megatron's. ``optimizers``: returns Megatron's, once they exist.
    """
    if groups[0].params and isinstance(groups[0].params[0], _load("lead.compensated:Compensated")):
        sending: Sending = _load("lead.virtual:Leads")(groups, buckets, optimizers)
        return sending
    return Sending([bucket.param_data for bucket in buckets], len(groups))
