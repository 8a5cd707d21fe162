"""``--optimizer sgd`` against plain NumPy."""

import dataclasses

import numpy as np
import pytest

from megatron_lossy.errors import UsageError
from megatron_lossy.train.config import TrainConfig
from tests.ranks import run_ranks
from tests.trainer import TINY


def _descend(rank: int, settings: dict, steps: int):
    """Steps with given gradients; returns for every parameter its values and the gradients, and the logged rates."""
    import torch
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    from megatron_lossy import device

    device.prepare()
    from megatron_lossy.train import parallel
    from megatron_lossy.train.model import build_model
    from megatron_lossy.train.optimizer import build_optimizer, lr_scale

    config = TrainConfig(**settings)
    history, rates = {}, []
    with parallel.world(config), parallel.model_parallel(config):
        (model,) = build_model(config, 256)
        optimizer, scheduler = build_optimizer(config, [model])
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            history[name] = [parameter.detach().double().numpy().copy()], []
        generator = torch.Generator().manual_seed(3)
        for _ in range(steps):
            model.zero_grad_buffer()
            scheduler.step(increment=config.global_batch_size)
            rates.append(get_canonical_lr_for_logging(optimizer.param_groups) / lr_scale(config))
            for name, parameter in parameters.items():
                # Adam would hide the size of a gradient; here they differ by orders of magnitude.
                gradient = torch.randn(parameter.shape, generator=generator) * 10.0 ** (len(name) % 5 - 3)
                parameter.main_grad.copy_(gradient)
                history[name][1].append(gradient.double().numpy())
            assert optimizer.step()[0]
            for name, parameter in parameters.items():
                history[name][0].append(parameter.detach().double().numpy().copy())
    return history, rates


def test_sgd():
    for momentum in (0.0, 0.9):
        settings = {
            **TINY,
            "optimizer": "sgd",
            "sgd_momentum": momentum,
            "lr": 0.5,
            "min_lr": 0.05,
            "lr_warmup_iters": 2,
            "weight_decay": 0.1,
            "clip_grad": 0.0,
            "data": "stdlib",
        }
        [(history, rates)] = run_ranks(_descend, 1, settings, 5)
        assert np.isclose(max(rates), 0.5)
        for name, (values, gradients) in history.items():
            weight, mean = values[0], 0.0
            decay = 0.1 if weight.ndim > 1 else 0.0
            for step, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), 1):
                mean = momentum * mean + (1 - momentum) * gradient
                weight = weight * (1 - rate * decay) - rate * mean / (1 - momentum**step)
                scale = np.abs(weight).max() + 1e-30
                assert np.abs(values[step] - weight).max() <= 4e-6 * scale, (name, momentum, step)


def test_momentum_is_checked():
    config = TrainConfig(**TINY, data="stdlib")
    with pytest.raises(UsageError, match="--sgd-momentum 1.0: must be in"):
        dataclasses.replace(config, sgd_momentum=1.0)
