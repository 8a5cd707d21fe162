"""Megatron's optimizer, sharded or whole, and its schedule of learning rates."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ...hooks.versions import optimizers
from .config import TrainConfig
from .nadam import NAdamW

# Megatron's distributed optimizer shards Adam's state only. With an epsilon so large that the second moment vanishes
# beside it, Adam's step is lr/epsilon times the mean gradient: exact SGD, since multiplying by a power of two is exact.
_SGD_SCALE = 2.0**40
# The momentum decay of NAdam times the length of the run: torch's default for 30,000 iterations.
_MOMENTUM_DECAY = 0.004 * 30_000


def lr_scale(config: TrainConfig) -> float:
    """The factor between the optimizer's learning rates and ``--lr``."""
    return _SGD_SCALE if config.optimizer == "sgd" else 1.0


def build_optimizer(config: TrainConfig, model_chunks: list) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of ``model_chunks``, each rank with its shard of the state or all of it, and its scheduler.

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
        for one in optimizers(optimizer):
            psi = config.nadam_momentum_decay
            one.optimizer = NAdamW.instead_of(
                one.optimizer, _MOMENTUM_DECAY / config.train_iters if psi is None else psi
            )
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
