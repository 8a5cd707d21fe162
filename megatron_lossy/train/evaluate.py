"""Validation loss of the replicas, of the owners' weights, or of both on the same batches."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from .config import TrainConfig
from .data import RankBatches
from .model import forward_step


def mean_loss(config: TrainConfig, sums: list[torch.Tensor]) -> float:
    """Loss per token over all micro-batches and ranks, on every rank.

    ``sums``: on ranks of the last pipeline stage, one vector (sum of losses, tokens) per micro-batch.
    """
    if parallel_state.is_pipeline_last_stage():
        total = torch.stack(sums).sum(0)
        torch.distributed.all_reduce(
            total, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
        )
        loss = total[:1] / total[1:]
    else:
        loss = torch.zeros(1, device=torch.cuda.current_device())
    if config.pipeline_model_parallel_size > 1:
        last = parallel_state.get_pipeline_model_parallel_last_rank()
        torch.distributed.broadcast(loss, last, group=parallel_state.get_pipeline_model_parallel_group())
    return loss.item()


def perplexity(loss: float) -> float:
    """As Megatron-LM reports it: of at most 20 nats."""
    return math.exp(min(20.0, loss))


def evaluate(
    config: TrainConfig, model_chunks: list, dataset: Any, number: int, lossy: Any, weights: str
) -> dict[str, float]:
    """The loss of evaluation ``number`` (from 0) by whose weights it is: "replica", "owner" or, for "both", both.

    Evaluation ``number`` has its own batches, which depend on nothing else, and uses no random state, so that
    evaluating does not disturb training. Collective over all ranks.
    """
    losses = {}
    if weights in ("replica", "both"):
        losses["replica"] = _loss(config, model_chunks, dataset, number)
    if weights in ("owner", "both"):
        with lossy.owner_weights(model_chunks):
            losses["owner"] = _loss(config, model_chunks, dataset, number)
    return losses


def _loss(config: TrainConfig, model_chunks: list, dataset: Any, number: int) -> float:
    samples = config.eval_iters * config.global_batch_size
    batches = RankBatches(dataset, config, consumed=number * samples)
    data_parallel = parallel_state.get_data_parallel_world_size()
    for chunk in model_chunks:
        chunk.eval()
    with torch.no_grad():
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model_chunks,
            num_microbatches=samples // (config.micro_batch_size * data_parallel),
            seq_length=config.seq_length,
            micro_batch_size=config.micro_batch_size,
            forward_only=True,
        )
    for chunk in model_chunks:
        chunk.train()
    return mean_loss(config, sums)
