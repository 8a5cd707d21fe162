"""Islands under ``megatron.training``: each is a job of its own, with a part of the data and folders of its own.

Megatron reads RANK and WORLD_SIZE of the island (:mod:`megatron_lossy.plugin`), and finds the island's process group
made already. So it counts, reduces and saves as if there were no other islands. This module does the rest: the samples,
the folders and the stop signals of each island.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from ... import device
from ...ledger import Patch, Takes
from .flags import CONSENSUS_FOLDER, folder_of_island, folder_to_load
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
        for name in _FOLDERS:
            if folder := getattr(args, name, None):
                setattr(args, name, folder_of_island(folder, island))
        if args.load:
            args.load = folder_to_load(args.load, island)


@contextlib.contextmanager
def consensus_saved(islands: RankIslands, args: Any) -> Iterator[bool]:
    """Surround a save of weights alone, in the folder of their mean. True for the first island, which writes."""
    folder = os.path.join(os.path.dirname(args.save), CONSENSUS_FOLDER)
    only_weights = {"save": folder, "no_save_optim": True, "no_save_rng": True, "async_save": False}
    before = {name: getattr(args, name, None) for name in only_weights}
    vars(args).update(only_weights)
    try:
        yield islands.world.island == 0
    finally:
        vars(args).update(before)


def enter(islands: RankIslands, args: Any) -> None:
    """Make the island the default world, after all checks. Megatron then finds it made."""
    if torch.distributed.is_initialized():
        return
    islands.world.seed = args.seed
    make = partial(device.init_process_group, args.distributed_backend)
    islands.world.open(make, timedelta(minutes=args.distributed_timeout_minutes))
