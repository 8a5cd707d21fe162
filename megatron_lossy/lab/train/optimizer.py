"""Megatron's optimizer, sharded or whole, and its schedule of learning rates."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ...hooks.versions import optimizers
from .config import TrainConfig

# Megatron's distributed optimizer shards Adam's state only. With an epsilon so large that the second moment vanishes
# against it, Adam's step is lr/epsilon times the mean gradient: exact SGD, since a power of two multiplies exactly.
_SGD_SCALE = 2.0**40
# The momentum decay of NAdam times the length of the run: torch's default for 30,000 iterations.
_MOMENTUM_DECAY = 0.004 * 30_000


def lr_scale(config: TrainConfig) -> float:
    """Return the factor between the optimizer's learning rates and ``--lr``."""
    return _SGD_SCALE if config.optimizer == "sgd" else 1.0


def build_optimizer(config: TrainConfig, model_chunks: list) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """Return the optimizer of ``model_chunks``, each rank with its shard of the state or all of it, and its scheduler.

    The scheduler counts samples, as Megatron-LM's does. Norms and biases are not decayed.
    """
    scale = lr_scale(config)
    sgd = config.optimizer == "sgd"
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=config.lr * scale,
            min_lr=config.min_lr * scale,
            weight_decay=config.weight_decay / scale,
            adam_beta1=config.sgd_momentum if sgd else config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=_SGD_SCALE if sgd else config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=config.bf16,
            params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
            use_distributed_optimizer=config.use_distributed_optimizer,
            overlap_param_gather=config.gathers_in_forward,
        ),
        model_chunks,
        use_gloo_process_groups=False,
    )
    if config.optimizer == "nadam":
        psi = config.nadam_momentum_decay
        psi = _MOMENTUM_DECAY / config.train_iters if psi is None else psi
        for wrapper in optimizers(optimizer):
            wrapper.optimizer = NAdamW.instead_of(wrapper.optimizer, psi)
    samples = config.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr * scale,
        min_lr=config.min_lr * scale,
        lr_warmup_steps=config.lr_warmup_iters * samples,
        lr_decay_steps=(config.lr_decay_iters or config.train_iters) * samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay / scale,
        end_wd=config.weight_decay / scale,
        wd_incr_steps=config.train_iters * samples,
        wd_incr_style="constant",
    )
    model_chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler


class NAdamW(torch.optim.Optimizer):
    """NAdam with decoupled weight decay: Adam that looks ahead by one step of its momentum.

    Dozat, *Incorporating Nesterov Momentum into Adam* (2016), with the schedule of torch.optim.NAdam:

        mu_t = beta1 (1 - 0.96^(t psi) / 2)
        w -= lr [(1 - mu_t) g / (1 - mu_1 … mu_t) + mu_(t+1) m / (1 - mu_1 … mu_(t+1))] / (sqrt(v_hat) + eps)

    psi ties mu to the length of a run. State and names are Adam's, so that Megatron's checkpoints fit: the products of mu
    are worked out again, not saved. :meth:`instead_of` makes one that replaces the Adam of a Megatron optimizer.

    Args:
        params: parameter groups, with ``lr``, ``weight_decay``, ``betas`` and ``eps``.
        momentum_decay: psi.
        step_in_group: whether a group has one ``step``, as in Apex and Transformer Engine, or each parameter (torch).
    """

    def __init__(self, params: Any, momentum_decay: float, step_in_group: bool) -> None:
        super().__init__(params, {"lr": 0.0, "weight_decay": 0.0, "betas": (0.9, 0.999), "eps": 1e-8})
        self._psi = momentum_decay
        self._step_in_group = step_in_group
        self._products: list[float] = [1.0]  # mu_1 … mu_t

    @classmethod
    def instead_of(cls, adam: torch.optim.Optimizer, momentum_decay: float) -> NAdamW:
        """Return an optimizer with the groups of ``adam`` before its first step: Megatron's shards are no leaves."""
        in_group = not isinstance(adam, torch.optim.AdamW)
        optimizer = cls([torch.zeros(1, requires_grad=True)], momentum_decay, step_in_group=in_group)
        optimizer.param_groups = adam.param_groups
        return optimizer

    def _mu(self, step: int, beta1: float) -> float:
        return beta1 * (1.0 - 0.5 * (0.96 ** (step * self._psi)))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Make one update of every parameter that has a gradient."""
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if self._step_in_group and parameters:
                group["step"] = int(group.get("step", 0)) + 1
            for parameter in parameters:
                self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state, gradient, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
        for name in ("exp_avg", "exp_avg_sq"):
            if name not in state:
                state[name] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        if self._step_in_group:
            step = group["step"]
        else:
            step = int(state.get("step", 0)) + 1
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
        mu, ahead = self._mu(step, beta1), self._mu(step + 1, beta1)
        while len(self._products) <= step:
            self._products.append(self._products[-1] * self._mu(len(self._products), beta1))
        product = self._products[step]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = state["exp_avg_sq"].div(1 - beta2**step).sqrt_().add_(group["eps"])
        parameter.addcdiv_(gradient, denominator, value=-group["lr"] * (1 - mu) / (1 - product))
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] * ahead / (1 - product * ahead))
