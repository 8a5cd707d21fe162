"""The making of a run: its exchanges, its model, and the workers that train it."""

from __future__ import annotations

from ... import hooks
from ...base.jobs import World
from ...base.registry import MECHANISMS
from ...config import LossyConfig
from ...run.base import Run
from ..virtual import VirtualCluster
from .config import TrainConfig
from .model import build_model
from .workers import Workers


def build_run(config: TrainConfig, lossy_config: LossyConfig, launched: World | None) -> Run:
    """The run that makes the exchanges: hooks in Megatron, or virtual workers. ``launched``: the jobs of real ranks."""
    if not config.virtual_workers:
        return hooks.install(lossy_config, config.train_iters, gapless=True, world=launched, asynchronous=True)
    workers, iterations = config.virtual_workers, lossy_config.iterations(config.train_iters)
    whole = not config.use_distributed_optimizer
    run: Run | None = MECHANISMS.first("virtual_run", lossy_config, workers, iterations, config.seed, whole)
    return VirtualCluster(lossy_config, workers, iterations, gapless=True) if run is None else run


def build_workers(config: TrainConfig, vocab_size: int, run: Run) -> tuple[list, Workers]:
    """The chunks of the model, whose exchanges ``run`` makes, and the workers that train them."""
    with run.building():
        model = build_model(config, vocab_size)
    run.attach(model[0])
    workers: Workers = (MECHANISMS.first("workers", run) or Workers)(config, model, run)
    for part in run.parts:
        part.ready()
    return model, workers
