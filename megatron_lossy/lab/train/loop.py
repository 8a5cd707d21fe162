"""The training loop: one run from its configuration to its summary.

The steps of an iteration, and the gathers of parameters around evaluation and saving, follow
``megatron/training/training.py`` of Megatron-LM.
"""

from __future__ import annotations

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

from ... import hooks
from ...base import device
from ...base.checkpoints import latest_iteration
from ...base.errors import cannot
from ...base.flags import identity
from ...base.jobs import World, launched_ranks
from ...config import LossyConfig
from ...delivery_log.writer import claim_delivery_log
from ...hooks.dataset_helper import build_helper
from ...run.base import Run
from ...transport import settled
from ..async_pipeline.workers import StageWorkers
from ..data import build_tokenizer
from ..virtual.cluster import VirtualCluster
from ..virtual.island_churn import ChurningIslands
from ..virtual.island_workers import IslandWorkers
from ..virtual.islands import VirtualIslands
from ..virtual.replicas import VirtualReplicas
from .checkpoint import Checkpoints, NotSaved
from .config import TrainConfig
from .data import RankBatches, build_datasets, check_data, fingerprint, same_everywhere, with_data_paths, write_text
from .facts import check_flags
from .metrics import Console, SilentConsole, perplexity
from .model import build_model, model_parallel, transformer_impl, world
from .optimizer import lr_scale
from .process import handling
from .records import Progress, Stop, header, open_writers
from .saved import changed_settings, check_folders, in_folders_of_job, same_folder, shared_settings, write_settings
from .sharpness import Sharpness
from .workers import Workers, begin_mean_loss, evaluate


class Divergence(RuntimeError):
    """The loss is infinite or not a number."""


def train(config: TrainConfig, lossy_config: LossyConfig, console: Console | None = None) -> dict[str, Any]:
    """Train to ``--train-iters``, or until a signal or ``--exit-interval`` says to stop; returns the summary.

    A collective call for all ranks of the world, which may follow another one in the same processes. The summary:
    ``iteration``, ``finished``, ``diverged`` (why, if the loss became infinite or no number), ``lm loss`` (of the
    last log interval) and ``valid`` (the losses of the last evaluation, by kind of weights). Raise
    :class:`UsageError` if the configuration or the folders are wrong, before any process group exists.
    """
    device.prepare()
    device.take_device()
    jobs = lossy_config.jobs()
    ranks = launched_ranks() * (1 if config.virtual_workers else jobs.launches)
    config.check_world(ranks)
    check_flags(config, lossy_config, ranks)
    lossy_config = settled(lossy_config)
    launched = None if config.virtual_workers else jobs.world(config.seed)
    if launched is not None:
        config = in_folders_of_job(config, lossy_config.jobs(), launched.job[0])
    transformer_impl(config)
    if config.data is None:
        check_data(config)
    check_folders(config, lossy_config)
    resumes = bool(config.load) and (same_folder(config.save, config.load) or latest_iteration(config.load) is not None)
    claim_delivery_log(lossy_config, config.data_parallel_size(ranks), resumes, identity(config), TrainConfig)
    if os.environ.get("RANK", "0") == "0":
        build_helper()
    with world(config, launched):
        paths = with_data_paths(config)
        if config.data is not None and torch.distributed.get_rank() == 0:
            write_text(paths)
        torch.distributed.barrier()
        data = same_everywhere(fingerprint(paths))
        check_folders(config, lossy_config, data, paths.data_path)
        if launched is not None:
            launched.compare(shared_settings(config, data))
        lossy = build_run(config, lossy_config, launched)
        try:
            with model_parallel(config):
                first = torch.distributed.get_rank() == 0
                run = _Run(config, lossy, paths, (console or Console()) if first and lossy.speaks else SilentConsole())
                if config.load and (changed := changed_settings(config, lossy_config, data)):
                    run.console.note(f"--load {config.load}: goes on with other settings: {changed}")
                if first:
                    write_settings(config, lossy_config, data)
                return run.run()
        finally:
            lossy.uninstall()


def build_run(config: TrainConfig, lossy_config: LossyConfig, launched: World | None) -> Run:
    """Return the run that makes the exchanges: hooks in Megatron, or virtual workers. ``launched``: jobs of real ranks."""
    if not config.virtual_workers:
        return hooks.install(lossy_config, config.train_iters, gapless=True, world=launched, asynchronous=True)
    workers, iterations = config.virtual_workers, lossy_config.iterations(config.train_iters)
    if lossy_config.averages:
        islands = VirtualIslands if lossy_config.island_schedule is None else ChurningIslands
        return islands(lossy_config, workers, iterations, config.seed, gapless=True)
    cluster = VirtualCluster if config.use_distributed_optimizer else VirtualReplicas
    return cluster(lossy_config, workers, iterations, gapless=True)


def build_workers(config: TrainConfig, vocab_size: int, run: Run) -> tuple[list, Workers]:
    """Return the chunks of the model, whose exchanges ``run`` makes, and the workers that train them."""
    with run.building():
        model = build_model(config, vocab_size)
    run.attach(model[0])
    kind: Any = Workers
    if run.config.averages and run.kind == "virtual":
        kind = IslandWorkers
    elif run.config.async_pipeline and run.kind == "Megatron":
        kind = StageWorkers
    workers: Workers = kind(config, model, run)
    run.events.built()
    return model, workers


class _Run:
    def __init__(self, config: TrainConfig, lossy: Run, paths: TrainConfig, console: Console) -> None:
        self.config = config
        self.lossy = lossy
        self.console = console
        self.iterations = lossy.config.iterations(config.train_iters)
        tokenizer, most = build_tokenizer(config.tokenizer), lossy.config.most_iterations(self.iterations)
        self.train_data, self.valid_data = build_datasets(paths, tokenizer, most)
        self.data_path = paths.data_path
        self.model, self.workers = build_workers(config, tokenizer.vocab_size, lossy)
        self.optimizer = self.workers.optimizer
        self.sharpness = Sharpness(config, self.model, self.optimizer, lossy, self.train_data)
        self.checkpoints = Checkpoints(self.model, self.optimizer, self.workers.scheduler, lossy, config.save_retain)
        self.progress = Progress()
        self.failed_saves = 0  # in a row
        self.hooked = config.gathers_in_forward  # forward hooks that gather parameters
        self.stop = Stop(lossy, saves=config.save is not None)
        self.summary: dict[str, Any] = {}

    def run(self) -> dict[str, Any]:
        self.console.note(header(self.config, self.lossy, self.data_path))
        for line in self.lossy.config.jobs().advice(self.iterations):
            self.console.note(line)
        resumed = self.progress.iteration if self._load() else None
        self.writers = open_writers(self.config, self.lossy.config, resumed, self.lossy.job)
        # The first forward pass has nothing to gather, and must not gather before the first update.
        self._gather_in_forward(False, sync=False)
        progress = self.progress
        batches = self.workers.training_batches(self.train_data, progress.iteration, progress.consumed_samples)
        finished, diverged = False, None
        batches = self._catch_up(batches)  # which may wait for others
        try:
            with handling(self.stop.on_signal):
                finished = self._train(batches)
                self.lossy.leave()
        except Divergence as error:
            diverged = str(error)
        finally:
            for writer in self.writers:
                writer.close()
        self._gather_in_forward(False)
        return {"iteration": progress.iteration, "finished": finished, "diverged": diverged, **self.summary}

    def _train(self, batches: list[RankBatches]) -> bool:
        """Iterate to the end (true), or until the run is stopped (false). Raise :class:`Divergence`."""
        config, progress = self.config, self.progress
        outcomes: deque[Callable[[], tuple[float, float, bool, int]]] = deque()
        grad_norm = 0.0
        while progress.iteration < self.iterations:
            batches = self._catch_up(batches)
            self.lossy.job_group.come_and_go()
            started = time.perf_counter()
            stop, diverged = 0, None
            outcomes.append(self._step(batches))
            self._gather_in_forward(True)
            progress.advance(self.workers.samples(progress.iteration))
            last = progress.iteration == self.iterations
            log, evaluate, save, leave = self._due(last)
            while len(outcomes) > (0 if log or evaluate or save or leave or stop or diverged else self.workers.late):
                loss, grad_norm, updated, stopped = outcomes.popleft()()
                progress.add(loss, updated)
                stop = stop or stopped
                if diverged is None and not math.isfinite(loss):
                    diverged = f"the loss of iteration {progress.iteration - len(outcomes)} is {loss}"
            progress.window_seconds += time.perf_counter() - started
            if self.sharpness.due(progress.iteration) and not diverged:
                self.sharpness.measure(progress.consumed_samples)
            if (log and progress.window_iterations) or diverged:
                self._log(grad_norm)
            if diverged:
                raise Divergence(diverged)
            if evaluate:
                self._evaluate()
            leave = leave or bool(stop)
            if config.save and (leave or save):
                self._save(goes_on=not (leave or last))
            if leave and not last:
                why = f"on {signal.Signals(stop).name}" if stop else "by --exit-interval"
                self.console.note(f"exiting {why} at iteration {progress.iteration}")
                return False
        return True

    def _catch_up(self, batches: list[RankBatches]) -> list[RankBatches]:
        """Go on with a later iteration if the run has made some without this job. Return ``batches``, or those from there on."""
        progress, config = self.progress, self.config
        # The last one evaluates, and saves.
        iteration = min(self.lossy.job_group.catch_up(progress.iteration), self.iterations - 1)
        if (missed := iteration - progress.iteration) <= 0:
            return batches
        without = f"{missed} were made without this {self.lossy.config.jobs().name}"
        self.console.note(f"  goes on at iteration {iteration:7d}: {without}")
        progress.consumed_samples += sum(map(self.workers.samples, range(progress.iteration, iteration)))
        progress.iteration = self.lossy.iteration = iteration
        self.lossy.begin_equal()
        self.workers.scheduler.step(increment=missed * config.global_batch_size)
        return self.workers.training_batches(self.train_data, iteration, progress.consumed_samples)

    def _due(self, last: bool) -> tuple[bool, bool, bool, bool]:
        """Return whether this iteration is one to log, to evaluate, to save, and to leave after."""
        config = self.config

        def every(interval: int | None) -> bool:
            return bool(interval) and self.progress.iteration % interval == 0

        log, save = every(config.log_interval) or last, every(config.save_interval) or last
        return log, bool(config.eval_iters) and (every(config.eval_interval) or last), save, every(config.exit_interval)

    def _step(self, batches: list[RankBatches]) -> Callable[[], tuple[float, float, bool, int]]:
        """Make one iteration. Return a function that waits for its results.

        They are the loss per token, the gradient norm, whether the weights were updated, and a signal or 0.

        The loss and the signal travel while the gradients are reduced and their norm is added up: over a long
        link one round trip after another would take longer than the update.
        """

        def begin(sums: list[torch.Tensor]) -> tuple[Callable[[], float], Callable[[], int]]:
            return begin_mean_loss(self.config, sums, late=bool(self.workers.late)), self.stop.begin()

        (loss, anyone_stopped), successful, grad_norm = self.workers.iterate(batches, begin)
        norm = self.workers.begin_norm(grad_norm)

        def finish() -> tuple[float, float, bool, int]:
            return loss(), norm(), successful, anyone_stopped()

        return finish

    def _gather_in_forward(self, on: bool, sync: bool = True) -> None:
        """Turn the forward hooks of ``--overlap-param-gather`` on or off. Off gathers the due data, if ``sync``."""
        if on == self.hooked or not self.config.gathers_in_forward:
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
            **self.sharpness.metrics(),
        }
        self.summary["lm loss"] = loss
        self.lossy.events.logged(loss)
        self.console.train(record, self.iterations, self.config.global_batch_size)
        self._write(record)

    def _write(self, record: dict[str, Any]) -> None:
        for writer in self.writers:
            writer.write(record)

    def _evaluate(self) -> None:
        config, iteration = self.config, self.progress.iteration
        self._gather_in_forward(False)
        number = -(-iteration // config.eval_interval) - 1
        losses = evaluate(config, self.workers, self.model, self.valid_data, number, self.lossy)
        for whose, loss in losses.items():
            record = {"kind": "valid", "iteration": iteration, "lm loss": loss, "lm loss PPL": perplexity(loss)}
            record["weights"] = whose
            self.console.valid(record)
            self._write(record)
        self.summary["valid"] = losses

    def _save(self, goes_on: bool) -> None:
        """Save. A run that ``goes_on`` may fail to, as often in a row as ``--save-failures`` says, and says so."""
        self._gather_in_forward(False)
        folder, iteration = self.config.save, self.progress.iteration
        progress = [dataclasses.asdict(self.progress)]
        torch.distributed.broadcast_object_list(progress)  # the seconds differ, and rank 0's are saved
        said, failed = [f"saved checkpoint of iteration {iteration:7d} to {folder}"], None
        try:
            self.checkpoints.save(folder, iteration, {"progress": progress[0]})
        except NotSaved as error:
            said, failed = [], error
        if (beside := self.lossy.job_group.saved_beside(folder)) is not None:  # of which all jobs are a part
            try:
                self.checkpoints.save_consensus(beside[0], iteration, beside[1])
            except NotSaved as error:
                failed = failed or error
        self.failed_saves = self.failed_saves + 1 if failed else 0
        if failed and not (goes_on and self.failed_saves <= self.config.save_failures):
            raise cannot("--save", failed.filename, "written", failed)
        if failed:
            said.append(f"{failed.filename}: {failed.strerror}; the run goes on (--save-failures)")
        self.console.note("  " + "; ".join(said))

    def _load(self) -> bool:
        """Load the checkpoint of ``--load`` if there is one; returns whether there was."""
        if (folder := self.config.load) is None:
            return False
        if same_folder(self.config.save, folder) and (rewound := self.lossy.job_group.rewind(folder)):
            self.console.note(f"  {rewound}")
        if latest_iteration(folder) is None:
            self.console.note(f"no checkpoint in {folder}: starting from random weights")
            self.lossy.set_iteration(0)  # what a killed run recorded before its first checkpoint no longer counts
            return False
        loaded = self.checkpoints.load(folder)
        self.progress = Progress(**loaded["progress"])
        self.console.note(f"  loaded checkpoint of iteration {self.progress.iteration:7d} from {folder}")
        ranks = torch.distributed.get_world_size()
        if self.progress.iteration >= self.iterations:
            self.console.note(f"nothing is left to do: iteration {self.iterations} of --train-iters is made")
        if loaded["ranks"] != ranks:
            self.console.note(f"  it was saved by {loaded['ranks']} ranks, now {ranks}: random states start anew")
        return True
