"""Validation loss of the replicas, of the owners' weights, or of both on the same batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from ...run.base import Run
from .config import TrainConfig
from .data import RankBatches
from .workers import Workers

Total = Callable[[torch.Tensor], torch.Tensor]


def mean_loss(config: TrainConfig, sums: list[torch.Tensor], of_jobs: Total | None = None) -> float:
    """Loss per token over all ranks, on every rank; see :func:`begin_mean_loss`."""
    return begin_mean_loss(config, sums, of_jobs)()


def begin_mean_loss(
    config: TrainConfig, sums: list[torch.Tensor], of_jobs: Total | None = None, late: bool = False
) -> Callable[[], float]:
    """Begin to add up losses. Returns a function that waits for the loss per token over all ranks.

    Both are collective calls. ``sums``: on ranks of the last pipeline stage, (sum of losses, tokens) of each rank of
    this process. ``of_jobs``: adds them up over jobs; without it they cover this rank's
    job. ``late``: the function may be called an iteration later; then no stage waits in it for another.
    """
    last_stage = parallel_state.is_pipeline_last_stage()
    counts = sums and last_stage and (not late or parallel_state.get_tensor_model_parallel_rank() == 0)
    total = torch.stack(sums).sum(0) if counts else torch.zeros(2, device=torch.cuda.current_device())
    group = None if late else parallel_state.get_data_parallel_group(with_context_parallel=True)
    work = torch.distributed.all_reduce(total, group=group, async_op=True) if late or last_stage else None

    def finish() -> float:
        if work is not None:
            work.wait()
        everywhere = of_jobs(total) if of_jobs is not None and (late or last_stage) else total
        loss = everywhere[:1] / everywhere[1:]
        if config.pipeline_model_parallel_size > 1 and not late:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(loss, last, group=parallel_state.get_pipeline_model_parallel_group())
        return loss.item()

    return finish


def evaluate(
    config: TrainConfig,
    workers: Workers,
    model_chunks: list,
    dataset: Any,
    number: int,
    lossy: Run,
) -> dict[str, float]:
    """The loss of evaluation ``number`` (from 0) by its weights: "replica", "owner", "consensus" (of jobs).

    For --eval-weights "both" it is the loss of replicas, and of the jobs' consensus, or with one job of the owners. If jobs do
    not meet, it is that of the owners in the place of their consensus.

    Evaluation ``number`` has its own batches, which depend on nothing else, and uses no random state, so that
    evaluating does not disturb training. Collective over all ranks.
    """
    samples, weights = config.eval_iters * config.global_batch_size, lossy.config.eval_weights

    def batches() -> list[RankBatches]:
        return workers.batches(dataset, consumed=number * samples)

    losses = {}
    if weights in ("replica", "both"):
        with evaluating(model_chunks):
            sums = workers.run(batches(), samples, forward_only=True)
        losses["replica"] = mean_loss(config, sums, lossy.total)
    whose = ("consensus" if lossy.config.jobs().several else "owner") if weights == "both" else weights
    if whose != "replica":
        held = lossy.consensus_weights if whose == "consensus" else lossy.owner_weights
        with held(model_chunks) as there, evaluating(model_chunks):
            sums = workers.evaluate_owner(batches(), samples)
        whose = "owner" if there is False else whose
        losses[whose] = mean_loss(config, sums, lossy.total)
    return losses


@contextlib.contextmanager
def evaluating(model_chunks: Sequence[Any]) -> Iterator[None]:
    """A context without gradients and without dropout, and so without random numbers."""
    for chunk in model_chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model_chunks:
            chunk.train()
