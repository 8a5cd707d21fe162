"""Increments and drift of weights in a real training run, on a virtual cluster, and predictions from the increments.

Real increments are correlated (momentum), and their scale follows the learning rate and the gradients. So a run should
have a constant learning rate, and predictions use the increments of the same window of iterations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from ...base import device
from ...base.errors import refuse
from ...base.theory.drift import drift_between, second_moments
from ...config import LossyConfig
from ..data import build_tokenizer
from ..train import parallel
from ..train.config import TrainConfig
from ..train.data import build_datasets
from ..train.model import build_model
from ..train.text import prepare_text, with_data_paths
from ..train.workers import Workers
from ..virtual import VirtualCluster
from .simulate import Measured, squared_differences

#: Groups of neighbouring coordinates. Groups share few units, so that their scatter is the error of a ratio.
GROUPS = 20


@dataclass(frozen=True)
class RealRun:
    """A run at loss rate ``p`` of parameters, iteration by iteration.

    ``increments`` [T, coordinates]: of sampled weights at their owners. ``between``, ``to_owner`` [T, GROUPS]: drift
    after each iteration, between two receivers and to the owner, means over groups of those weights.
    """

    p: float
    increments: np.ndarray
    between: np.ndarray
    to_owner: np.ndarray


@dataclass(frozen=True)
class Prediction:
    """One kind of drift over a window of a run, measured, and predicted from the second moments of its increments.

    Both are in units of the mean squared increment. The error is that of measured against predicted.
    """

    measured: Measured
    predicted: float


def train(
    config: TrainConfig, lossy_config: LossyConfig, coordinates: int, tick: Callable[[], None] = lambda: None
) -> RealRun:
    """Train as ``config`` says (``--virtual-workers`` at least 3), and measure at ``coordinates`` random weights."""
    if (config.virtual_workers or 0) < 3:
        raise refuse("--virtual-workers", config.virtual_workers, "must be at least 3, for two receivers and an owner")
    config.check_world(1)
    device.prepare()
    with parallel.world(config):
        prepare_text(config)
        with parallel.model_parallel(config):
            cluster = VirtualCluster(lossy_config, config.virtual_workers, config.train_iters)
            try:
                return _measure(config, lossy_config.p_param, cluster, coordinates, tick)
            finally:
                cluster.uninstall()


def _measure(
    config: TrainConfig, p: float, cluster: VirtualCluster, coordinates: int, tick: Callable[[], None]
) -> RealRun:
    tokenizer = build_tokenizer(config.tokenizer)
    data, _ = build_datasets(with_data_paths(config), tokenizer)
    with cluster.building():
        model = build_model(config, tokenizer.vocab_size)
    cluster.attach(model[0])
    workers = Workers(config, model, cluster)
    batches = workers.batches(data, consumed=0)
    parameters = list(model[0].parameters())
    size = sum(parameter.numel() for parameter in parameters)
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(config.seed))[:coordinates].sort().values

    def sample() -> np.ndarray:
        flat = torch.cat([parameter.detach().view(-1) for parameter in parameters])
        return flat[chosen.to(flat.device)].double().cpu().numpy()

    owner, increments, drifts = sample(), [], []
    for _ in range(config.train_iters):
        model[0].zero_grad_buffer()
        workers.optimizer.zero_grad()
        workers.run(batches, config.global_batch_size, forward_only=False)
        workers.step()
        workers.scheduler.step(increment=config.global_batch_size)
        before, owner = owner, sample()
        increments.append(owner - before)
        gaps = []
        for worker in range(cluster.workers):
            with cluster.worker(worker):
                gaps.append(sample() - owner)
        pairs = np.array_split(squared_differences(np.array(gaps)), GROUPS, axis=1)
        drifts.append([part.mean(axis=1) for part in pairs])
        tick()
    between, to_owner = np.moveaxis(np.array(drifts), 2, 0)
    return RealRun(p, np.array(increments), between, to_owner)


def predict(
    run: RealRun, measured: np.ndarray, formula: Callable[..., np.ndarray], first: int, lags: int
) -> Prediction:
    """``measured``, one of the drifts of ``run`` from iteration ``first`` on, with the prediction of ``formula``."""
    groups = [second_moments(part[first:], lags) for part in np.array_split(run.increments, GROUPS, axis=1)]
    predictions = np.array([formula(run.p, gamma) for gamma in groups])
    means = measured[first:].mean(axis=0)
    ratio = means.sum() / predictions.sum()
    scatter = means - ratio * predictions
    error = scatter.std(ddof=1) / np.sqrt(GROUPS) / predictions.mean()
    gamma = second_moments(run.increments[first:], lags)
    predicted = float(formula(run.p, gamma / gamma[0]))
    return Prediction(Measured(float(ratio * predicted), float(error * predicted)), predicted)


def trailing(run: RealRun, window: int, lags: int) -> tuple[np.ndarray, np.ndarray]:
    """Iterations, and for each the drift between receivers predicted from the ``window`` iterations up to it."""
    ends = np.arange(window, len(run.increments) + 1, max(1, window // 4))
    drifts = [drift_between(run.p, second_moments(run.increments[end - window : end], lags)) for end in ends]
    return ends, np.array(drifts)
