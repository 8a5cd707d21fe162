"""Checkpoints: whole or absent, whenever the run is killed.

Format and names are Megatron's (``torch_dist`` of ``megatron.core.dist_checkpointing`` in ``iter_0000100/``, and
``latest_checkpointed_iteration.txt``). A checkpoint is written under a temporary name, synced to disk and renamed.
Only then does the tracker name it, by a rename as well.
"""

from __future__ import annotations

import contextlib
import multiprocessing.dummy
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.utils import unwrap_model

from ..files import publish, write_text
from ..hooks.rng import rng_state, set_rng_state
from ..ledger import Ledger, Patch
from ..run import Run
from .saved import TRACKER, iteration_folder, latest_iteration


class Checkpoints:
    """Saves and loads one run's model, optimizer, scheduler and random states. All methods are collective."""

    def __init__(self, model_chunks: list, optimizer: Any, scheduler: Any, lossy: Run) -> None:
        self._chunks = model_chunks
        self._model = unwrap_model(model_chunks[0])
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._lossy = lossy

    def save(self, folder: str, iteration: int, common: dict[str, Any]) -> None:
        """Write the checkpoint of ``iteration`` into ``folder``, with ``common`` values, equal on all ranks."""
        first = torch.distributed.get_rank() == 0
        final = iteration_folder(folder, iteration)
        if latest_iteration(folder) == iteration:
            torch.distributed.barrier()
            return
        aside = final.with_name(final.name + ".tmp")
        if first:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
        torch.distributed.barrier()
        strategy = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy("torch_dist"), self._data_parallel_group()
        )
        with self._lossy.owner_weights(self._chunks):
            state = self._state(is_loading=False)
            state |= {
                "iteration": iteration,
                "ranks": _ranks(),
                "scheduler": self._scheduler.state_dict(),
                **common,
            }
            with _in_this_process():
                dist_checkpointing.save(state, str(aside), strategy)
        self._lossy.save_replicas(aside)
        torch.distributed.barrier()
        if first:
            # A folder of this name that the tracker does not name is what a killed run left.
            shutil.rmtree(final, ignore_errors=True)
            publish(aside, final)
            write_text(Path(folder) / TRACKER, str(iteration))
        torch.distributed.barrier()

    def load(self, folder: str) -> dict[str, Any]:
        """Load the latest checkpoint in ``folder``; returns its ``common`` values, ``iteration`` and ``ranks``.

        Another number of data-parallel ranks is fine, except that random states then start anew.
        """
        path = str(iteration_folder(folder, latest_iteration(folder)))
        saved = dist_checkpointing.load_common_state_dict(path)
        state = self._state(is_loading=True)
        same_ranks = saved["ranks"] == _ranks()
        if not same_ranks:
            del state["rng_state"]
        loaded = dist_checkpointing.load(state, path)
        self._model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        self._scheduler.load_state_dict(loaded["scheduler"])
        if same_ranks:
            set_rng_state(loaded["rng_state"])
        self._lossy.set_iteration(loaded["iteration"])
        self._lossy.load_replicas(path)
        return loaded

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": self._data_parallel_group(),
        }
        state: dict[str, Any] = {"model": self._model.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        state["rng_state"] = ShardedObject("rng_state", rng_state(), (ranks,), (rank,))
        return state

    @staticmethod
    def _data_parallel_group() -> torch.distributed.ProcessGroup:
        return parallel_state.get_data_parallel_group(with_context_parallel=True)


@contextlib.contextmanager
def _in_this_process() -> Iterator[None]:
    ledger = Ledger("synchronous checkpoints of megatron-core")
    ledger.install(
        [
            Patch(
                target="megatron.core.dist_checkpointing.strategies.filesystem_async:mp",
                value=lambda: types.SimpleNamespace(get_context=lambda _=None: multiprocessing.dummy),
                why="writes from threads instead of forked processes. Of a rank that is killed, those live on and hold "
                "its sockets, so that no other rank notices; and the process of their queue takes seconds to start, "
                "and dies of the SIGTERM on which we save",
                versions="all; from 0.18 on only the queue has a process",
                until="Megatron saves synchronously without processes",
            )
        ]
    )
    try:
        yield
    finally:
        ledger.uninstall()


def _ranks() -> int:
    return torch.distributed.get_world_size()
