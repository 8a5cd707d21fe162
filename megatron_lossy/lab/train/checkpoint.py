"""Checkpoints: whole or absent, whenever the run is killed.

Format and names are Megatron's (``torch_dist`` of ``megatron.core.dist_checkpointing`` in ``iter_0000100/``, and
``latest_checkpointed_iteration.txt``). A checkpoint is written under a temporary name, synced to disk and renamed.
Only then does the tracker name it, by a rename as well.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.dummy
import os
import pickle
import re
import shutil
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint import CheckpointException, FileSystemReader

from ...base.checkpoints import TRACKER, iteration_folder, iterations_in, latest_iteration
from ...base.errors import MACHINE_ERRORS, UsageError, cannot, machine_error, refuse
from ...base.files import publish, write_text
from ...base.ledger import Patch, patched
from ...hooks.rng import rng_state, set_rng_state
from ...run.base import Run
from .process import OtherRankFailed, lost_contact

# The file of the iterations whose checkpoints its folder's run wrote.
_WRITTEN = "written_checkpoints.txt"
# The suffix of a folder until its checkpoint is whole.
_ASIDE = ".tmp"
# Errors from reading a damaged file, or a file that lacks values of the model.
_DAMAGE = (CheckpointingException, EOFError, KeyError, OSError, ValueError, pickle.UnpicklingError)
# torch reports the same by a plain RuntimeError, and other code raises that too.
_CUT_SHORT = re.compile("PytorchStreamReader|unexpected EOF|corrupt")
_THREADS = Patch(
    target="megatron.core.dist_checkpointing.strategies.filesystem_async:mp",
    value=lambda: types.SimpleNamespace(get_context=lambda _=None: multiprocessing.dummy),
    why="writes from threads instead of forked processes. Of a rank that is killed, those live on and hold "
    "its sockets, so that no other rank notices; and the process of their queue takes seconds to start, "
    "and dies of the SIGTERM on which we save",
)


class NotSaved(OSError):
    """A checkpoint cannot be written. All ranks raise it, and earlier checkpoints are as they were."""


class Checkpoints:
    """Saves and loads one run's model, optimizer, scheduler and random states. All methods are collective.

    ``keep``: checkpoints that stay in a folder after a save, the newest; ``None``: all.
    """

    def __init__(self, model_chunks: list, optimizer: Any, scheduler: Any, lossy: Run, keep: int | None = None) -> None:
        self._keep = keep
        self._chunks = model_chunks
        self._model = unwrap_model(model_chunks[0])
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._lossy = lossy

    def save(self, folder: str, iteration: int, common: dict[str, Any]) -> None:
        """Write the checkpoint of ``iteration`` into ``folder``, with ``common`` values, equal on all ranks.

        Raise :class:`NotSaved`. Then the checkpoint is not there.
        """

        def fill(aside: Path) -> None:
            with self._lossy.owner_weights(self._chunks):
                said = {"iteration": iteration, "ranks": _ranks(), "scheduler": self._scheduler.state_dict(), **common}
                self._store(self._state(is_loading=False) | said, aside)
            _on_all_ranks(lambda: self._lossy.save_replicas(aside))

        self._save(folder, iteration, fill)

    def save_consensus(self, folder: str, iteration: int, writes: bool) -> None:
        """Write only the mean weights of all jobs into ``folder``, as :meth:`save` does.

        A collective call of all jobs; one of them ``writes``, unless they do not meet.
        """

        def fill(aside: Path) -> None:
            model = self._model.sharded_state_dict(metadata=self._metadata())
            self._store({"model": model, "iteration": iteration, "ranks": _ranks()}, aside)

        with self._lossy.consensus_weights(self._chunks) as there:
            if writes and there is not False:
                self._save(folder, iteration, fill)

    def _save(self, folder: str, iteration: int, fill: Callable[[Path], None]) -> None:
        final = iteration_folder(folder, iteration)
        if (latest := latest_iteration(folder)) == iteration:
            torch.distributed.barrier()
            return
        aside = final.with_name(final.name + _ASIDE)
        try:
            self._write(aside, final, iteration, fill)
        except (Exception, CheckpointException) as error:
            agreed = error if isinstance(error, NotSaved) else None
            failed = agreed or machine_error(error) or _failure_in_text(error) or _tried(aside)
            first = torch.distributed.get_rank() == 0
            if everywhere := isinstance(error, NotSaved | CheckpointException) or _ranks() == 1:
                failed = _on_any_rank(failed)  # from here no rank writes any more, and the first one may clear up
            if first or not everywhere:
                shutil.rmtree(aside, ignore_errors=True)
            if failed is None and everywhere and not first:  # the first rank has all failures
                raise OtherRankFailed("another rank could not write the checkpoint") from None
            if failed is None:
                raise
            where = Path(failed.filename or folder)
            if agreed and not (where.is_relative_to(folder) or Path(folder).is_relative_to(where)):
                raise OSError(failed.errno, failed.strerror, failed.filename) from None  # the folder of a log, say
            kept = "" if latest is None else f"; that of iteration {latest} is whole"
            what = f"{failed.strerror}: the checkpoint of iteration {iteration} was not saved{kept}"
            raise (NotSaved if everywhere else OSError)(failed.errno, what, folder) from None

    def _write(self, aside: Path, final: Path, iteration: int, fill: Callable[[Path], None]) -> None:
        first = torch.distributed.get_rank() == 0

        def begin() -> None:
            for left in final.parent.glob(f"iter_*{_ASIDE}"):  # left by a killed run
                shutil.rmtree(left, ignore_errors=True)
            aside.mkdir(parents=True)
            if failed := _tried(aside):  # the first rank alone writes common.pt, and others would wait for it
                raise failed

        def end() -> None:
            with open(final.parent / _WRITTEN, "a") as file:
                file.write(f"{iteration}\n")
            # A killed run may have left a folder of this name that the tracker does not name.
            shutil.rmtree(final, ignore_errors=True)
            publish(aside, final)
            write_text(final.parent / TRACKER, str(iteration))
            if self._keep is not None:
                _remove_older(final.parent, iteration, self._keep)

        _on_all_ranks(begin, first)
        fill(aside)
        _on_all_ranks(end, first)

    def _store(self, state: dict[str, Any], folder: Path) -> None:
        inner = get_default_save_sharded_strategy("torch_dist")
        strategy = FullyParallelSaveStrategyWrapper(inner, self._metadata()["dp_cp_group"])
        with patched("synchronous checkpoints of megatron-core", _THREADS), _errors_only_raised():
            dist_checkpointing.save(state, str(folder), strategy)

    def load(self, folder: str) -> dict[str, Any]:
        """Load the latest checkpoint in ``folder``; returns its ``common`` values, ``iteration`` and ``ranks``.

        Another number of data-parallel ranks is fine, except that random states then start anew. Raise
        :class:`UsageError` for a checkpoint that cannot be read.
        """
        path = str(iteration_folder(folder, latest_iteration(folder)))
        with _reading(path, (Exception,)):  # only files are read, and unpickling may raise any error
            saved = dist_checkpointing.load_common_state_dict(path)
            FileSystemReader(path).read_metadata()  # torch would print a traceback of its errors
        state = self._state(is_loading=True)
        same_ranks = saved["ranks"] == _ranks()
        if not same_ranks:
            del state["rng_state"]
        with _reading(path):
            loaded = dist_checkpointing.load(state, path)
        self._model.load_state_dict(loaded["model"])
        self._optimizer.load_state_dict(loaded["optimizer"])
        self._scheduler.load_state_dict(loaded["scheduler"])
        if same_ranks:
            set_rng_state(loaded["rng_state"])
        self._lossy.set_iteration(loaded["iteration"])
        with _reading(path):
            self._lossy.load_replicas(path)
        return loaded

    def _state(self, is_loading: bool) -> dict[str, Any]:
        metadata = self._metadata()
        state: dict[str, Any] = {"model": self._model.sharded_state_dict(metadata=metadata)}
        state["optimizer"] = self._optimizer.sharded_state_dict(state, is_loading=is_loading, metadata=metadata)
        state["rng_state"] = ShardedObject("rng_state", rng_state(), (_ranks(),), (torch.distributed.get_rank(),))
        return state

    def _metadata(self) -> dict[str, Any]:
        return {
            "distrib_optim_sharding_type": "dp_reshardable",
            "singleton_local_shards": False,
            "chained_optim_avoid_prefix": True,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }


def _remove_older(folder: Path, iteration: int, keep: int) -> None:
    """Remove checkpoints that the run wrote before ``iteration``, which is whole, but the last ``keep`` - 1."""
    written = set((folder / _WRITTEN).read_text().split())  # also before it was resumed
    older = [one for one in iterations_in(folder) if one < iteration and str(one) in written]
    for one in older[: max(0, len(older) - (keep - 1))]:
        path = iteration_folder(folder, one)
        aside = path.with_name(path.name + _ASIDE)
        with contextlib.suppress(OSError):  # a process that reads it, or may not delete it, keeps it for longer
            os.replace(path, aside)  # a kill must not leave half of it under its name
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _errors_only_raised() -> Iterator[None]:
    """Return a context without megatron-core's log of errors in writing processes. The errors are still raised."""
    logger = logging.getLogger("megatron.core.dist_checkpointing.strategies.filesystem_async")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _failure_in_text(error: BaseException) -> OSError | None:
    """Return the failure of the machine in the text of ``error``, of another process or of another rank."""
    told = re.search(r"\[Errno (\d+)\]", str(error))
    number = int(told[1]) if told else None
    return OSError(number, os.strerror(number)) if number in MACHINE_ERRORS else None


def _tried(folder: Path) -> OSError | None:
    """Return the failure of the machine to write into ``folder`` now. torch's writer reports only a wrong position."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return machine_error(error)
    return None


def _on_all_ranks(act: Callable[[], None], here: bool = True) -> None:
    """Call ``act`` on this rank if it is for this one, ``here``. A collective call.

    If it raises :class:`OSError` on any rank, all ranks raise :class:`NotSaved`.
    """
    failed: OSError | None = None
    try:
        if here:
            act()
    except OSError as error:
        failed = error
    if failed := _on_any_rank(failed):
        raise NotSaved(failed.errno, failed.strerror, failed.filename) from None


def _on_any_rank(failed: OSError | None) -> OSError | None:
    """Return ``failed``, or the first failure of another rank. A collective call of all ranks that are alive."""
    found: list[OSError | None] = [None] * _ranks()
    with contextlib.suppress(RuntimeError):
        torch.distributed.all_gather_object(found, failed)
    return failed or next(filter(None, found), None)


@contextlib.contextmanager
def _reading(path: str, damage: tuple[type[Exception], ...] = _DAMAGE) -> Iterator[None]:
    """Return a context in which an error of the types ``damage`` means that the checkpoint at ``path`` is damaged."""
    try:
        yield
    except UsageError:
        raise
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):  # raised on all ranks, also on those that could read
            cause = next((failure for failure, _ in error.failures.values()), error)
        if failed := machine_error(cause):
            raise cannot("--load", path, "read", failed) from None
        elsewhere = lost_contact(cause) or isinstance(cause, torch.OutOfMemoryError)
        cut_short = isinstance(cause, RuntimeError) and _CUT_SHORT.search(str(cause))
        if elsewhere or not (isinstance(cause, damage) or cut_short):
            if cause is error:
                raise
            raise cause from error
        reason = " ".join(f"{type(cause).__name__}: {cause}".partition(". ")[0].split()).rstrip(": ")[:200]
        folder = Path(path).parent
        older = [one for one in iterations_in(folder) if iteration_folder(folder, one) < Path(path)]
        remedy = f"; to go on from iteration {older[-1]}, write that number into {TRACKER}" if older else ""
        raise refuse("--load", path, f"cannot be read ({reason}){remedy}") from None


def _ranks() -> int:
    return torch.distributed.get_world_size()
