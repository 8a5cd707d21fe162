"""The data-parallel ranks that this process computes for: its own, or all of a virtual cluster, one after another; and evaluation by them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func

from ...hooks.rng import rng_state, set_rng_state
from ...run.base import Run
from .config import TrainConfig
from .data import RankBatches
from .model import forward_step
from .optimizer import build_optimizer

Begun = TypeVar("Begun")


class Workers:
    """Runs micro-batches of every rank of this process, each with the rank's own replica, data and random state.

    ``run``: whose exchanges they make. A rank has its data by its number among those of all jobs. ``late``: number of
    iterations after which the loss and the norm of an iteration must be known. ``optimizer``, ``scheduler``: of the model.
    """

    late = 0

    def __init__(self, config: TrainConfig, model_chunks: list, run: Run) -> None:
        self._config = config
        self._chunks = model_chunks
        self._lossy = run
        self.optimizer, self.scheduler = self._built()

    def _built(self) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        return build_optimizer(self._config, self._chunks)

    def training_batches(self, dataset: GPTDataset, iteration: int, consumed: int) -> list[RankBatches]:
        """Return the argument of :meth:`iterate`, after ``iteration`` iterations with ``consumed`` samples."""
        return self.batches(dataset, consumed)

    def samples(self, iteration: int) -> int:
        """Return samples of iteration number ``iteration`` (from 0)."""
        return self._config.global_batch_size

    def batches(self, dataset: GPTDataset, consumed: int) -> list[RankBatches]:
        """Return the micro-batches of each rank from global sample ``consumed`` on."""
        run, parts = self._lossy, self._lossy.config.jobs().parts
        return [RankBatches(dataset, self._config, consumed, rank, run.workers, parts) for rank in run.local]

    def run(self, batches: list[RankBatches], samples: int, forward_only: bool) -> list[torch.Tensor]:
        """Run forward (and backward) passes over the next ``samples`` samples of all ranks of the world.

        Return for each rank of this process its (sum of losses, tokens); nothing before the last pipeline stage.
        Gradients are reduced at the end on real ranks, and of virtual workers by :meth:`step`.
        """
        return self._take_turns(self._lossy, batches, samples, forward_only)

    def _take_turns(self, run: Run, batches: list[RankBatches], samples: int, forward_only: bool) -> list[torch.Tensor]:
        """Call :meth:`run` for the workers of ``run``, each with its own of ``batches``."""
        # All ranks start an iteration with the same random state and draw equally many numbers.
        state = rng_state() if len(batches) > 1 and self._draws and not forward_only else None
        sums = []
        for worker, own in enumerate(batches):
            if state is not None:
                set_rng_state(state)
            with run.worker(worker, evaluates=forward_only):
                sums += self._run(own, samples, forward_only)
        return sums

    @property
    def _draws(self) -> bool:
        """Whether passes with gradients draw random numbers."""
        return self._config.hidden_dropout > 0 or self._config.attention_dropout > 0

    def iterate(
        self, batches: list[RankBatches], begin: Callable[[list[torch.Tensor]], Begun]
    ) -> tuple[Begun, bool, float]:
        """Make one iteration. Return ``begin``'s result, whether weights changed, and the gradient norm.

        ``begin`` gets the sums of :meth:`run`, as soon as they are known.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        begun = begin(self.run(batches, self._config.global_batch_size, forward_only=False))
        successful, grad_norm, _ = self.step()
        if successful:
            self.scheduler.step(increment=self._config.global_batch_size)
        return begun, successful, grad_norm or 0.0

    def begin_norm(self, grad_norm: float) -> Callable[[], float]:
        """Return a function that waits for the global gradient norm. ``grad_norm``: this rank's norm."""
        return lambda: grad_norm

    def step(self) -> tuple[bool, float | None, int | None]:
        """Make the update. Return the result of ``optimizer.step()``: success, gradient norm, number of zeros."""
        return self._lossy.step(self.optimizer)

    def evaluate_owner(self, batches: list[RankBatches], samples: int) -> list[torch.Tensor]:
        """Run as :meth:`run` does, without gradients, with the weights in the model: the owners'."""
        sums = []
        for worker, own in enumerate(batches):
            with self._lossy.data_of(worker):
                sums += self._run(own, samples, forward_only=True)
        return sums

    def _micro_batches_of(self, samples: int) -> int:
        """Return micro-batches of each rank, of ``samples`` of all ranks."""
        return samples // (self._config.micro_batch_size * self._lossy.workers)

    def _run(self, batches: RankBatches, samples: int, forward_only: bool) -> list[torch.Tensor]:
        sums = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=self._chunks,
            num_microbatches=self._micro_batches_of(samples),
            seq_length=self._config.seq_length,
            micro_batch_size=self._config.micro_batch_size,
            forward_only=forward_only,
        )
        return [torch.stack(sums).sum(0)] if sums else []


# --- validation loss of the replicas, of the owners' weights, or of both on the same batches -----------------------------


def begin_mean_loss(
    config: TrainConfig,
    sums: list[torch.Tensor],
    of_jobs: Callable[[torch.Tensor], torch.Tensor] | None = None,
    late: bool = False,
) -> Callable[[], float]:
    """Begin to add up losses. Return a function that waits for the loss per token over all ranks.

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
    config: TrainConfig, workers: Workers, model_chunks: list, dataset: Any, number: int, lossy: Run
) -> dict[str, float]:
    """Return the loss of evaluation ``number`` (from 0) by its weights: "replica", "owner", "consensus" (of jobs).

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
        losses["replica"] = begin_mean_loss(config, sums, lossy.job_group.total)()
    whose = ("consensus" if lossy.config.jobs().several else "owner") if weights == "both" else weights
    if whose != "replica":
        held = lossy.consensus_weights if whose == "consensus" else lossy.owner_weights
        with held(model_chunks) as there, evaluating(model_chunks):
            sums = workers.evaluate_owner(batches(), samples)
        whose = "owner" if there is False else whose
        losses[whose] = begin_mean_loss(config, sums, lossy.job_group.total)()
    return losses


@contextlib.contextmanager
def evaluating(model_chunks: Sequence[Any]) -> Iterator[None]:
    """Return a context without gradients and without dropout, and so without random numbers."""
    for chunk in model_chunks:
        chunk.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for chunk in model_chunks:
            chunk.train()
