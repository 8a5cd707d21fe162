"""Islands under ``megatron.training``: each is a job of its own, with a part of the data and folders of its own.

Megatron reads RANK and WORLD_SIZE of the island (:mod:`megatron_lossy.plugin`), and finds the island's process group
made already. So it counts, reduces and saves as if there were no other islands. This module does the rest: the samples,
the folders and the stop signals of each island.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ...base import device
from ...base.ledger import Patch, Takes
from .ranks import RankIslands

_FOLDERS = ("save", "tensorboard_dir", "non_persistent_global_ckpt_dir")
_UNTIL = "Megatron knows of jobs beside its own"


def patches(islands: RankIslands) -> list[Patch]:
    """Patches of Megatron's training program for islands."""
    samplers = [
        Patch(
            target=f"megatron.{module}.data_samplers:{name}.__init__",
            around=partial(sampler, islands),
            why="a rank takes its samples by its number among the ranks of all islands",
            versions=versions,
            until=_UNTIL,
            optional=True,
            takes=Takes(named=("consumed_samples", "data_parallel_rank", "data_parallel_size")),
        )
        for module, versions in (("legacy.data", "below 0.16"), ("training.datasets", "0.16 and later"))
        for name in ("MegatronPretrainingSampler", "MegatronPretrainingRandomSampler")
    ]
    return [
        *samplers,
        Patch(
            target="megatron.training.training:get_train_valid_test_num_samples",
            around=partial(number_of_samples, islands),
            why="all islands together read as many times the samples of one",
            versions="all",
            until=_UNTIL,
        ),
        Patch(
            target="megatron.training.dist_signal_handler:DistributedSignalHandler.signals_received",
            around=partial(signals_received, islands),
            why="islands that are told to stop do so after the same iteration",
            versions="all",
            until=_UNTIL,
            takes=Takes(("self",), others=()),
        ),
    ]


_signature = functools.lru_cache(inspect.signature)


def sampler(islands: RankIslands, original: Callable, *args: Any, **kwargs: Any) -> None:
    """Wraps the constructor of a sampler: this rank takes its samples by its number among the ranks of all islands."""
    world = islands.world
    bound = _signature(original).bind(*args, **kwargs)
    given = bound.arguments
    given["data_parallel_rank"] += world.island * given["data_parallel_size"]
    given["data_parallel_size"] *= world.islands
    given["consumed_samples"] *= world.islands
    original(*bound.args, **bound.kwargs)


def number_of_samples(islands: RankIslands, original: Callable) -> tuple[int | None, ...]:
    """Wraps the count of samples for training, validation and test: multiplies it by the number of islands."""
    return tuple(None if number is None else number * islands.world.islands for number in original())


def signals_received(islands: RankIslands, original: Callable, handler: Any) -> list[bool]:
    """Wraps the question, once in an iteration, which ranks received a signal. Islands agree on the answer."""
    return [bool(islands.agree(int(any(original(handler)))))]


def before_validation(islands: RankIslands, args: Any) -> None:
    """Give Megatron the folders of the island, before it checks its arguments. A second call changes nothing."""
    if getattr(args, "megatron_lossy_island", None) is None:
        args.megatron_lossy_island = island = islands.world.island
        jobs = islands.config.jobs()
        for name in _FOLDERS:
            if folder := getattr(args, name, None):
                setattr(args, name, jobs.folder(folder, island))
        if args.load:
            args.load = jobs.folder_to_load(args.load, island)


def enter(islands: RankIslands, args: Any) -> None:
    """Make the island the default world, after all checks. Megatron then finds it made."""
    if torch.distributed.is_initialized():
        return
    islands.world.seed = args.seed
    make = partial(device.init_process_group, args.distributed_backend)
    islands.world.open(make, timedelta(minutes=args.distributed_timeout_minutes))


class TrainingIslands(RankIslands):
    """Islands that may run under ``megatron.training``."""

    def training_patches(self) -> list[Patch]:
        return patches(self)

    def before_arguments(self, args: Any) -> None:
        before_validation(self, args)

    def after_arguments(self, args: Any) -> None:
        enter(self, args)
