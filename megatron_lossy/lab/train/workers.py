"""The data-parallel ranks that this process computes for: its own, or all of a virtual cluster, one after another."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
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
        """The argument of :meth:`iterate`, after ``iteration`` iterations with ``consumed`` samples."""
        return self.batches(dataset, consumed)

    def samples(self, iteration: int) -> int:
        """Samples of iteration number ``iteration`` (from 0)."""
        return self._config.global_batch_size

    def batches(self, dataset: GPTDataset, consumed: int) -> list[RankBatches]:
        """The micro-batches of each rank from global sample ``consumed`` on."""
        return [RankBatches(dataset, self._config, consumed, rank, self._lossy.workers) for rank in self._lossy.local]

    def run(self, batches: list[RankBatches], samples: int, forward_only: bool) -> list[torch.Tensor]:
        """Run forward (and backward) passes over the next ``samples`` samples of all ranks of the world.

        Returns for each rank of this process its (sum of losses, tokens); nothing before the last pipeline stage.
        Gradients are reduced at the end on real ranks, and of virtual workers by :meth:`step`.
        """
        return self._take_turns(self._lossy, batches, samples, forward_only)

    def _take_turns(self, run: Run, batches: list[RankBatches], samples: int, forward_only: bool) -> list[torch.Tensor]:
        """:meth:`run` for the workers of ``run``, each with its own of ``batches``."""
        # All ranks start an iteration with the same random state and draw equally many numbers.
        draws = len(batches) > 1 and self._draws and not forward_only
        state = rng_state() if draws else None
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
        """Make one iteration with ``batches``. Returns ``begin``'s result, whether weights changed, and the gradient
        norm.

        ``begin`` gets the sums of :meth:`run`, as soon as they are known.
        """
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        sums = self.run(batches, self._config.global_batch_size, forward_only=False)
        begun = begin(sums)
        successful, grad_norm, _ = self.step()
        if successful:
            self.scheduler.step(increment=self._config.global_batch_size)
        return begun, successful, grad_norm or 0.0

    def begin_norm(self, grad_norm: float) -> Callable[[], float]:
        """Returns a function that waits for the global gradient norm. ``grad_norm``: this rank's norm."""
        return lambda: grad_norm

    def step(self) -> tuple[bool, float | None, int | None]:
        """Make the update. Returns the result of ``optimizer.step()``: success, gradient norm, number of zeros."""
        return self._lossy.step(self.optimizer)

    def evaluate_owner(self, batches: list[RankBatches], samples: int) -> list[torch.Tensor]:
        """Runs as :meth:`run` does, without gradients, and with the weights that are in the model: the owners'."""
        sums = []
        for worker, own in enumerate(batches):
            with self._lossy.data_of(worker):
                sums += self._run(own, samples, forward_only=True)
        return sums

    def _micro_batches_of(self, samples: int) -> int:
        """Micro-batches of each rank, of ``samples`` of all ranks."""
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
