"""The training loop: one run from its configuration to its summary.

The steps of an iteration, and the gathers of parameters around evaluation and saving, follow
``megatron/training/training.py`` of Megatron-LM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from .. import device, hooks
from ..config import LossyConfig
from ..data import build_tokenizer, epochs
from ..delivery_log.writer import claim_delivery_log
from ..flags import identity
from ..mechanisms.async_pipeline.workers import StageWorkers
from ..mechanisms.islands.flags import CONSENSUS_FOLDER
from ..mechanisms.islands.methods import notes_on_averaging
from ..mechanisms.islands.rewind import rewind
from ..mechanisms.islands.virtual import VirtualIslands
from ..mechanisms.islands.workers import IslandWorkers
from ..mechanisms.islands.world import IslandWorld
from ..mechanisms.replicas.virtual import VirtualReplicas
from ..run import Run
from ..virtual import VirtualCluster, VirtualRun
from . import parallel
from .checkpoint import Checkpoints
from .checks import check_flags
from .config import TrainConfig
from .data import RankBatches, build_datasets
from .evaluate import begin_mean_loss, evaluate
from .log import Console, Silent
from .metrics import check_wandb, perplexity
from .model import build_model, transformer_impl
from .optimizer import build_optimizer, lr_scale
from .process import launched_ranks, told_to_end
from .records import Progress, open_writers
from .saved import check_folders, in_folders_of_island, latest_iteration, same_folder, write_settings
from .text import check_data, fingerprint, prepare_text, same_everywhere, with_data_paths
from .workers import Workers


def _most_iterations(config: TrainConfig, lossy_config: LossyConfig) -> int:
    """Iterations of the island that makes most of them."""
    iterations = lossy_config.iterations(config.train_iters)
    islands = range(lossy_config.islands if lossy_config.averages else 1)
    return max(lossy_config.local_iterations(island, iterations) for island in islands)


class Diverged(RuntimeError):
    """The loss is infinite or not a number."""


def train(config: TrainConfig, lossy_config: LossyConfig, console: Console | None = None) -> dict[str, Any]:
    """Train to ``--train-iters``, or until a signal or ``--exit-interval`` says to stop; returns the summary.

    A collective call for all ranks of the world, which may follow another one in the same processes. The summary:
    ``iteration``, ``finished``, ``diverged`` (why, if the loss became infinite or no number), ``lm loss`` (of the
    last log interval) and ``valid`` (the losses of the last evaluation, by kind of weights). Raises
    :class:`UsageError` if the configuration or the folders are wrong, before any process group exists.
    """
    device.prepare()
    device.take_device()
    ranks = launched_ranks()
    config.check_world(ranks)
    check_flags(config, lossy_config, ranks)
    virtual = config.virtual_workers is not None
    island = None
    if lossy_config.averages and not virtual:
        island = IslandWorld(lossy_config.islands, config.seed)
        config = in_folders_of_island(config, island.island)
    transformer_impl(config)
    if config.wandb_project:
        check_wandb(config.wandb_project)
    if config.data is None:
        check_data(config)
    check_folders(config, lossy_config)
    resumes = bool(config.load) and (same_folder(config.save, config.load) or latest_iteration(config.load) is not None)
    claim_delivery_log(lossy_config, config.data_parallel_size(ranks), resumes, identity(config), TrainConfig)
    with parallel.world(config, island):
        prepare_text(config)
        paths = with_data_paths(config)
        data = same_everywhere(fingerprint(paths))
        check_folders(config, lossy_config, data)
        if lossy_config.averages and virtual:
            steps = lossy_config.iterations(config.train_iters)
            lossy: Run = VirtualIslands(lossy_config, config.virtual_workers, steps, config.seed, gapless=True)
        elif config.virtual_workers:
            kind = VirtualCluster if config.use_distributed_optimizer else VirtualReplicas
            lossy = kind(lossy_config, config.virtual_workers, config.train_iters, gapless=True)
        else:
            lossy = hooks.install(lossy_config, config.train_iters, gapless=True, world=island, asynchronous=True)
        try:
            with parallel.model_parallel(config):
                first = torch.distributed.get_rank() == 0
                speaks = first and (island is None or island.island == 0)
                run = _Run(config, lossy_config, lossy, paths, (console or Console()) if speaks else Silent())
                if first:
                    write_settings(config, lossy_config, data)
                return run.run()
        finally:
            lossy.uninstall()


class _Run:
    """The state of one run on this rank."""

    def __init__(
        self, config: TrainConfig, lossy_config: LossyConfig, lossy: Run, paths: TrainConfig, console: Console
    ) -> None:
        self.config = config
        self.lossy_config = lossy_config
        self.lossy = lossy
        self.islands = lossy.part("islands") if isinstance(lossy, hooks.Lossy) else None
        self.console = console
        tokenizer = build_tokenizer(config.tokenizer)
        self.train_data, self.valid_data = build_datasets(paths, tokenizer, _most_iterations(config, lossy_config))
        self.data_path = paths.data_path
        virtual = lossy if isinstance(lossy, VirtualRun | VirtualIslands) else None
        with virtual.building() if virtual else contextlib.nullcontext():
            self.model = build_model(config, tokenizer.vocab_size)
        if virtual:
            virtual.attach(self.model[0])
        self.workers: Workers
        if isinstance(lossy, VirtualIslands):
            self.workers = islands = IslandWorkers(config, self.model, lossy)
            self.optimizer, self.scheduler = islands.optimizer, islands.scheduler
        elif lossy_config.async_pipeline and not virtual:
            self.optimizer, self.scheduler = build_optimizer(config, self.model)
            self.workers = lossy.pipeline = StageWorkers(
                config, self.model, self.optimizer, lossy_config, *self._island()
            )
        else:
            cluster = lossy if isinstance(lossy, VirtualRun) else None
            self.workers = Workers(config, self.model, cluster, *self._island())
            self.optimizer, self.scheduler = build_optimizer(config, self.model)
        if self.islands is not None:
            self.islands.check()
        self.checkpoints = Checkpoints(self.model, self.optimizer, self.scheduler, lossy)
        self.iterations = lossy_config.iterations(config.train_iters)
        self.progress = Progress()
        self.hooked = config.gathers_in_forward  # forward hooks that gather parameters
        self.stop = 0
        self.summary: dict[str, Any] = {}

    def _island(self) -> tuple[int, int]:
        """The number of this rank's island, and how many there are."""
        return (0, 1) if self.islands is None else (self.islands.world.island, self.islands.world.islands)

    def run(self) -> dict[str, Any]:
        self.console.header(self._header())
        for note in notes_on_averaging(self.lossy_config, self.iterations):
            self.console.note(note)
        resumed = self._load()
        self.writers = open_writers(self.config, self.lossy_config, self.progress.iteration if resumed else None)
        # The first forward pass has nothing to gather, and must not gather before the first update.
        self._gather_in_forward(False, sync=False)
        progress = self.progress
        batches = self.workers.training_batches(self.train_data, progress.iteration, progress.consumed_samples)
        previous = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        finished, diverged = False, None
        try:
            finished = self._train(batches)
        except Diverged as error:
            diverged = str(error)
        else:
            if isinstance(self.lossy, hooks.Lossy):
                self.lossy.leave()
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
            self.writers.close()
        if self.hooked:
            self._gather_in_forward(False)
        iteration = self.progress.iteration
        return {"iteration": iteration, "finished": finished, "diverged": diverged, **self.summary}

    def _train(self, batches: list[RankBatches]) -> bool:
        """Iterate to the end (true), or until somebody stops the run (false). Raises :class:`Diverged`."""
        config, progress = self.config, self.progress
        outcomes: deque[Callable[[], tuple[float, float, bool, int]]] = deque()
        while progress.iteration < self.iterations:
            started = time.perf_counter()
            outcomes.append(self._step(batches))
            if not self.hooked:
                self._gather_in_forward(True)
            progress.advance(self.workers.samples(progress.iteration))
            last = progress.iteration == self.iterations
            log, evaluate, save, leave = self._due(last)
            stop, diverged = 0, None
            while len(outcomes) > (0 if log or evaluate or save or leave or stop or diverged else self.workers.late):
                loss, grad_norm, updated, stopped = outcomes.popleft()()
                progress.add(loss, updated)
                stop = stop or stopped
                if diverged is None and not math.isfinite(loss):
                    diverged = f"the loss of iteration {progress.iteration - len(outcomes)} is {loss}"
            progress.window_seconds += time.perf_counter() - started
            if log or diverged:
                self._log(grad_norm)
            if diverged:
                raise Diverged(diverged)
            if evaluate:
                self._evaluate()
            leave = leave or bool(stop)
            if config.save and (leave or save):
                self._save()
            if leave and not last:
                why = f"on {signal.Signals(stop).name}" if stop else "by --exit-interval"
                self.console.note(f"exiting {why} at iteration {progress.iteration}")
                return False
        return True

    def _due(self, last: bool) -> tuple[bool, bool, bool, bool]:
        """Whether this iteration is one to log, to evaluate, to save, and to leave after."""
        config = self.config

        def every(interval: int | None) -> bool:
            return bool(interval) and self.progress.iteration % interval == 0

        evaluate = bool(config.eval_iters) and (every(config.eval_interval) or last)
        return (
            every(config.log_interval) or last,
            evaluate,
            every(config.save_interval) or last,
            every(config.exit_interval),
        )

    def _step(self, batches: list[RankBatches]) -> Callable[[], tuple[float, float, bool, int]]:
        """Make one iteration. Returns a function that waits for its results.

        They are the loss per token, the gradient norm, whether the weights were updated, and a signal or 0.

        The loss and the signal travel while the gradients are reduced and their norm is added up: over a long
        link one round trip after another would take longer than the update.
        """

        def begin(sums: list[torch.Tensor]) -> tuple[Callable[[], float], Callable[[], int]]:
            return begin_mean_loss(self.config, sums, late=bool(self.workers.late)), self._begin_stopping()

        begun, successful, grad_norm = self.workers.iterate(batches, self.optimizer, self.scheduler, begin)
        loss, anyone_stopped = begun
        norm = self.workers.begin_norm(grad_norm)

        def finish() -> tuple[float, float, bool, int]:
            return loss(), norm(), successful, anyone_stopped()

        return finish

    def _begin_stopping(self) -> Callable[[], int]:
        """Begin to agree whether to stop, so that all leave after the same iteration.

        Returns a function that waits for the signal that told any rank to stop, or 0.
        """
        if self.islands is not None:
            return self.islands.begin_agree(self.stop)
        stop = torch.tensor([self.stop], dtype=torch.int32, device=device.current_device())
        work = torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            return int(stop.item())

        return finish

    def _on_signal(self, number: int, _: Any) -> None:
        self.stop = number
        if number == signal.SIGTERM:
            told_to_end()
        if number == signal.SIGINT:
            # A second signal ends this rank at once. A second Ctrl-C at torchrun arrives as SIGTERM.
            for again in (signal.SIGINT, signal.SIGTERM):
                signal.signal(again, signal.SIG_DFL)
            if torch.distributed.get_rank() == 0:
                saves = ", with a checkpoint" if self.config.save else "; without --save nothing is kept"
                # The signal may have interrupted print().
                os.write(1, f"stopping after this iteration{saves}; Ctrl-C again ends at once\n".encode())

    def _gather_in_forward(self, on: bool, sync: bool = True) -> None:
        """Turn the forward hooks of ``--overlap-param-gather`` on or off. Off gathers what is due, if ``sync``."""
        if not self.config.gathers_in_forward:
            return
        self.hooked = on
        for chunk in self.model:
            if on:
                chunk.enable_forward_pre_hook()
            else:
                chunk.disable_forward_pre_hook(param_sync=sync)

    def _log(self, grad_norm: float) -> None:
        loss, skipped, seconds = self.progress.close_window()
        record = {
            "kind": "train",
            "iteration": self.progress.iteration,
            "consumed samples": self.progress.consumed_samples,
            "lm loss": loss,
            "grad norm": grad_norm,
            "learning rate": get_canonical_lr_for_logging(self.optimizer.param_groups) / lr_scale(self.config),
            "loss scale": self.optimizer.get_loss_scale().item(),
            "skipped": skipped,
            "seconds": seconds,
            **self.lossy.metrics(),
        }
        self.summary["lm loss"] = loss
        self.console.train(record, self.iterations, self.config.global_batch_size)
        self.writers.write(record)

    def _evaluate(self) -> None:
        config, iteration = self.config, self.progress.iteration
        if self.hooked:
            self._gather_in_forward(False)
        number = -(-iteration // config.eval_interval) - 1
        weights = self.lossy_config.eval_weights
        losses = evaluate(config, self.workers, self.model, self.valid_data, number, self.lossy, weights)
        for whose, loss in losses.items():
            record = {
                "kind": "valid",
                "iteration": iteration,
                "lm loss": loss,
                "lm loss PPL": perplexity(loss),
                "weights": whose,
            }
            self.console.valid(record)
            self.writers.write(record)
        self.summary["valid"] = losses

    def _save(self) -> None:
        if self.hooked:
            self._gather_in_forward(False)
        iteration = self.progress.iteration
        progress = [dataclasses.asdict(self.progress)]
        torch.distributed.broadcast_object_list(progress)  # the seconds differ, and rank 0's are saved
        self.checkpoints.save(self.config.save, iteration, {"progress": progress[0]})
        if self.lossy_config.save_consensus:
            folder = self.config.save if self.islands is None else os.path.dirname(self.config.save)
            writes = self._island()[0] == 0
            self.checkpoints.save_consensus(os.path.join(folder, CONSENSUS_FOLDER), iteration, writes)
        self.console.note(f"  saved checkpoint of iteration {iteration:7d} to {self.config.save}")

    def _header(self) -> str:
        """The losses, the workers, and the epochs of training data, in words."""
        config, ranks = self.config, torch.distributed.get_world_size()
        tensor, pipeline = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        if config.virtual_workers:
            who = f"virtual workers {config.virtual_workers}, in memory"
            if self.lossy_config.averages:
                who += f", on {self.lossy_config.islands} islands"
        else:
            island, islands = self._island()
            data = islands * config.data_parallel_size(ranks)
            who = f"data-parallel ranks {data}, over {torch.distributed.get_backend()}"
            if islands > 1:
                who += f", on {islands} islands, of which this is number {island}"
            if tensor * pipeline > 1:
                who += f", tensor {tensor} x pipeline {pipeline}"
        seen = epochs(self.data_path, config.train_iters * config.global_batch_size * config.seq_length)
        return f"loss: {self.lossy_config.describe()} | {who}, on {device.device_type()} | {seen:.3g} epochs of data"

    def _load(self) -> bool:
        """Load the checkpoint of ``--load`` if there is one; returns whether there was."""
        folder = self.config.load
        if folder is None:
            return False
        goes_on = self.islands is not None and same_folder(self.config.save, folder)
        if goes_on and (rewound := rewind(folder, self.islands)):
            self.console.note(f"  {rewound}")
        if latest_iteration(folder) is None:
            self.console.note(f"no checkpoint in {folder}: starting from random weights")
            self.lossy.set_iteration(0)  # what a killed run recorded before its first checkpoint no longer counts
            return False
        loaded = self.checkpoints.load(folder)
        self.progress = Progress(**loaded["progress"])
        self.console.note(f"  loaded checkpoint of iteration {self.progress.iteration:7d} from {folder}")
        ranks = torch.distributed.get_world_size()
        if loaded["ranks"] != ranks:
            self.console.note(f"  it was saved by {loaded['ranks']} ranks, now {ranks}: random states start anew")
        return True
