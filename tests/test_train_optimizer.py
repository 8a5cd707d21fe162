"""``--optimizer sgd`` against plain NumPy, ``nadam`` against torch's."""

import numpy as np
import pytest

from megatron_lossy.lab.train.config import TrainConfig
from tests.ranks import run_ranks
from tests.trainer import TINY

pytestmark = pytest.mark.shows("`--optimizer sgd` and `nadam` by value")


def _descend(rank: int, settings: dict, steps: int):
    """Steps with given gradients; returns for every parameter its values and the gradients, and the logged rates."""
    import torch
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    from megatron_lossy.base import device

    device.prepare()
    from megatron_lossy.lab.train.model import build_model, model_parallel, world
    from megatron_lossy.lab.train.optimizer import build_optimizer, lr_scale

    config = TrainConfig(**settings)
    history, rates = {}, []
    with world(config), model_parallel(config):
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
        settings = TINY | dict(
            optimizer="sgd", sgd_momentum=momentum, lr=0.5, min_lr=0.05, weight_decay=0.1, clip_grad=0.0
        )
        settings |= {"lr_warmup_iters": 2, "data": "stdlib"}
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


@pytest.mark.parametrize("step_in_group", [True, False])
def test_nadam_is_torchs_with_decoupled_decay(step_in_group):
    """Within rounding, through 60 steps with a learning rate that changes, and after its state was saved and loaded."""
    import torch

    from megatron_lossy.lab.train.optimizer import NAdamW

    options = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-7}
    start = torch.randn(40, generator=torch.Generator().manual_seed(1))
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    optimizer = NAdamW([{"params": [ours], **options}], 0.02, step_in_group)
    reference = torch.optim.NAdam([theirs], momentum_decay=0.02, decoupled_weight_decay=True, foreach=False, **options)
    generator = torch.Generator().manual_seed(2)
    for step in range(60):
        for group in optimizer.param_groups + reference.param_groups:
            group["lr"] = 0.02 * 0.97**step
        ours.grad = torch.randn(40, generator=generator)
        theirs.grad = ours.grad.clone()
        optimizer.step()
        reference.step()
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-8)
        if step == 30:
            saved = optimizer.state_dict()
            optimizer = NAdamW([{"params": [ours], **options}], 0.02, step_in_group)
            optimizer.load_state_dict(saved)
    assert set(optimizer.state[ours]) - {"step"} == {"exp_avg", "exp_avg_sq"}
