"""Megatron's distributed optimizer and its schedule of learning rates."""

from __future__ import annotations

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from .config import TrainConfig


def build_optimizer(config: TrainConfig, model_chunks: list) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """The optimizer of ``model_chunks``, each rank with its shard of the state, and its scheduler.

    The scheduler counts samples, as Megatron-LM's does. Norms and biases are not decayed.
    """
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",  # the only one that the distributed optimizer shards
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            clip_grad=config.clip_grad,
            bf16=config.bf16,
            params_dtype=torch.bfloat16 if config.bf16 else torch.float32,
            use_distributed_optimizer=True,
            overlap_param_gather=config.gathers_in_forward,
        ),
        model_chunks,
    )
    samples = config.global_batch_size
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.lr_warmup_iters * samples,
        lr_decay_steps=(config.lr_decay_iters or config.train_iters) * samples,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.train_iters * samples,
        wd_incr_style="constant",
    )
    model_chunks[0].config.grad_scale_func = optimizer.scale_loss
    return optimizer, scheduler
