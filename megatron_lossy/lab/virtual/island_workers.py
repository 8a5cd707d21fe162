"""Islands in the training program: an iteration of each in its turn, then the exchanges between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.datasets.gpt_dataset import GPTDataset
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from ..train.config import TrainConfig
from ..train.data import RankBatches
from ..train.optimizer import build_optimizer
from ..train.workers import Begun, Workers
from .islands import VirtualIslands


class IslandWorkers(Workers):
    """All workers of all islands.

    ``optimizer`` and ``scheduler`` are those of the first island, which a checkpoint has. :meth:`iterate` uses those of
    every island.
    """

    def __init__(self, config: TrainConfig, model_chunks: list, run: VirtualIslands) -> None:
        self._islands = run
        super().__init__(config, model_chunks, run)

    def _built(self) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
        flags, steps = self._islands.config, self._islands.config.iterations(self._config.train_iters)
        local = [flags.local_iterations(island, steps) for island in range(flags.islands)]
        built = [build_optimizer(_with_clock(self._config, own), self._chunks) for own in local]
        self._optimizers, self._schedulers = zip(*built, strict=True)
        self._islands.start(self._optimizers, self._schedulers)
        return built[0]

    def training_batches(self, dataset: GPTDataset, iteration: int, consumed: int) -> list[RankBatches]:
        flags, size, batches = self._islands.config, self._islands.workers, []
        for rank in self._islands.local:  # ``iteration`` is the slowest island's
            made = flags.local_iterations(rank * flags.islands // size, iteration) * self._config.global_batch_size
            batches.append(RankBatches(dataset, self._config, made, rank, size))
        return batches

    def samples(self, iteration: int) -> int:
        made = sum(self._due(island, iteration) for island in self._islands.present)
        return made * self._config.global_batch_size // self._islands.config.islands

    def _due(self, island: int, iteration: int) -> int:
        """Return local iterations of ``island`` in iteration number ``iteration`` of the slowest."""
        flags = self._islands.config
        return flags.local_iterations(island, iteration + 1) - flags.local_iterations(island, iteration)

    def iterate(
        self, batches: list[RankBatches], begin: Callable[[list[torch.Tensor]], Begun]
    ) -> tuple[Begun, bool, float]:
        islands = self._islands
        sums, norms = [], []
        successful: dict[int, bool] = {}
        for island in range(islands.config.islands):
            if island not in islands.present:
                for batch in self._batches_of(island, batches):
                    batch.skip(self._config.global_batch_size)
                # Learning rates follow the run, not the islands that make the iterations.
                self._schedulers[island].step(increment=self._config.global_batch_size)
                continue
            due = self._due(island, islands.iteration)
            for number in range(due):
                own, updated, norm = self._one(island, batches)
                sums += own
                norms.append(norm)
                if number + 1 < due:
                    islands.clusters[island].finish_iteration(updated)
            successful[island] = updated
        islands.exchange(successful)
        return begin(sums), all(successful.values()), sum(norms) / len(norms)

    def _one(self, island: int, batches: list[RankBatches]) -> tuple[list[torch.Tensor], bool, float]:
        config, optimizer = self._config, self._optimizers[island]
        with self._islands.random_state(island, self._draws), self._islands.turn(island):
            for chunk in self._chunks:
                chunk.zero_grad_buffer()
            optimizer.zero_grad()
            sums = self._run_island(island, batches, config.global_batch_size, forward_only=False)
            updated, norm, _ = self._islands.clusters[island].make_update(optimizer)
        if updated:
            self._schedulers[island].step(increment=config.global_batch_size)
        return sums, updated, norm or 0.0

    def run(self, batches: list[RankBatches], samples: int, forward_only: bool) -> list[torch.Tensor]:
        """Run as :meth:`Workers.run` does, without gradients. Every worker has its replica of its island's weights."""
        assert forward_only, "gradients are computed by iterate()"
        sums = []
        for island in self._islands.present:
            with self._islands.turn(island, keep=False):
                sums += self._run_island(island, batches, samples, forward_only)
        return sums

    def _run_island(self, island: int, batches: list[RankBatches], samples: int, forward_only: bool) -> list[Any]:
        cluster, own = self._islands.clusters[island], self._batches_of(island, batches)
        return self._take_turns(cluster, own, samples, forward_only)

    def _batches_of(self, island: int, batches: list[RankBatches]) -> list[RankBatches]:
        workers = self._islands.clusters[island].workers
        return batches[island * workers : (island + 1) * workers]


def _with_clock(config: TrainConfig, iterations: int) -> TrainConfig:
    """Return ``config`` for an island that makes ``iterations``, with a shorter schedule of learning rates."""
    if iterations == config.train_iters:
        return config
    share = iterations / config.train_iters
    warmup, decay = round(config.lr_warmup_iters * share), config.lr_decay_iters
    decay = decay and max(1, round(decay * share))
    warmup = min(warmup, (decay or iterations) - 1)
    return dataclasses.replace(config, train_iters=iterations, lr_warmup_iters=warmup, lr_decay_iters=decay)
