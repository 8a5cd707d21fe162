"""Facts for the table of refusals, of our trainer's configuration; and the check against it. Needs no process group."""

from __future__ import annotations

from ...base.device import device_type
from ...base.errors import refuse
from ...config import LossyConfig
from ...config.facts import Facts
from ...hooks.checks import check_run
from ...hooks.facts import ranks_of_host
from ..virtual.island_schedule import check_schedule
from .config import TrainConfig


def of_trainer(config: TrainConfig, ranks: int) -> Facts:
    """Return facts of a run of :mod:`megatron_lossy.train` on ``ranks`` ranks, into which ``config`` must divide."""
    size = config.data_parallel_size(ranks)
    return Facts(
        workers=size,
        virtual=config.virtual_workers is not None,
        largest_group=size,
        ranks_of_host=ranks_of_host(),
        device=device_type(),
        train_iters=config.train_iters,
        ends=True,
        flushes=False,
        saves=config.save is not None,
        tensor=config.tensor_model_parallel_size,
        copies_apart=config.tensor_model_parallel_size > 1,
        pipeline=config.pipeline_model_parallel_size,
        stages_inside=config.use_tp_pp_dp_mapping,
        layers=config.num_layers,
        tied=config.share_embeddings_and_output_weights,
        predicts_more_tokens=False,
        fp16=False,
        gradient_bytes=4,
        weight_bytes=2 if config.bf16 else 4,
        per_token_loss=config.calculate_per_token_loss,
        distributed_optimizer=config.use_distributed_optimizer,
        optimizer=config.optimizer,
        layer_wise=False,
        optimizer_instances=config.num_distributed_optimizer_instances,
        overlap_param_gather=config.overlap_param_gather,
    )


def check_flags(config: TrainConfig, lossy: LossyConfig, ranks: int) -> None:
    """Raise :class:`UsageError` for flags that cannot run on ``ranks`` ranks, which ``config`` must divide."""
    if config.sharpness_interval and (lossy.averages or lossy.async_pipeline):
        what = "--islands" if lossy.averages else "--async-pipeline"
        why = f"cannot be combined with {what}: needs one optimizer"
        raise refuse("--sharpness-interval", config.sharpness_interval, why)
    if config.save_retain == 1 and lossy.jobs().several and not config.virtual_workers:
        why = "must be at least 2 with --islands: after a kill between their saves all go on from the one before"
        raise refuse("--save-retain", config.save_retain, why)
    check_run(lossy, of_trainer(config, ranks))
    check_schedule(lossy, config.train_iters)
