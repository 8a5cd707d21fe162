"""Run a function on several real ranks, in fresh processes that start quickly: over gloo, or on CUDA devices that they share.

Importing torch and megatron-core costs seconds per process. A fork server imports them once, and each rank is
forked from it: fresh state for every test at the price of a fork.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

from tests.slurm_cluster import free_ports

# Oversubscribed cores crawl, and sums must not depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"
# The fork server looks whether there is a GPU, and must not take hold of it.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


#: Where ranks compute, "cpu" or "cuda": tests/conftest.py sets it for each test.
kind = "cpu"


class RankFailed(AssertionError):
    """A rank raised or died; the text holds every failed rank's traceback."""


def _rank_main(connection, rank, world_size, store, environment, grouped, kind):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(number) for name, number in numbers.items()} | environment)
    faulthandler.enable()  # a rank that a signal ends prints its stacks
    try:
        import torch

        torch.set_num_threads(1)
        _take_device(kind, rank, torch)
        if grouped:
            address, backend = f"file://{store}", {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[kind]
            torch.distributed.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
        while True:
            try:
                function, args = connection.recv()
            except EOFError:
                break
            result = function(rank, *args)
            if grouped:
                torch.distributed.barrier()
            connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        os._exit(0)


def _take_device(kind, rank, torch):
    """Ranks share the devices; those of the CPU see none."""
    if kind == "cuda":
        number = rank % torch.cuda.device_count()
        os.environ["LOCAL_RANK"] = str(number)
        torch.cuda.set_device(number)
        torch.cuda.set_per_process_memory_fraction(0.08)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False
    elif torch.cuda.is_available():
        os.environ["CUDA_VISIBLE_DEVICES"] = ""


class _World:
    """``size`` ranks, each in a process of its own, which wait for calls."""

    def __init__(self, size: int, environment: dict[str, str], grouped: bool, on: str) -> None:
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._ranks = []
        for rank in range(size):
            parent, child = context.Pipe()
            process = context.Process(
                target=_rank_main, args=(child, rank, size, store, environment, grouped, on), daemon=True
            )
            process.start()
            child.close()
            self._ranks.append((process, parent))

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        """Return the results of ``function(rank, *args)``. The ranks end if it fails."""
        self._signal(signal.SIGCONT)
        try:
            for _, pipe in self._ranks:
                with contextlib.suppress(BrokenPipeError):  # what it died of can be read
                    pipe.send((function, args))
            results, errors = self._results(timeout)
            if errors:
                raise RankFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        except BaseException:
            self.end(0)
            raise
        self._signal(signal.SIGSTOP)  # a thread of each of Gloo's groups would wake up a hundred times a second
        return results

    def _signal(self, number: int) -> None:
        for process, _ in self._ranks:
            with contextlib.suppress(ProcessLookupError):  # it died
                os.kill(process.pid, number)

    def _results(self, timeout: float) -> tuple[list[Any], dict[int, str]]:
        """Return results of ranks, and the errors of those that fail."""
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * len(self._ranks)
        errors: dict[int, str] = {}
        waiting = set(range(len(self._ranks)))
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                errors.update(dict.fromkeys(waiting, f"no result after {timeout} s"))
                break
            pipes = {self._ranks[rank][1]: rank for rank in waiting}
            # After a failure the others may hang in a collective: give them a while to report as well. Over UDP a rank that
            # died is believed to be gone after 3 s of silence.
            wait = min(remaining, 6.0) if errors else remaining
            ready = multiprocessing.connection.wait(list(pipes), timeout=wait)
            if errors and not ready:
                break
            for pipe in ready:
                rank = pipes[pipe]
                waiting.discard(rank)
                try:
                    ok, value = pipe.recv()
                except (EOFError, ConnectionResetError):
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
        return results, errors

    def end(self, timeout: float = 10) -> None:
        """End the processes; kill those that have not ended after ``timeout`` seconds."""
        self._signal(signal.SIGCONT)
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(timeout)
            if process.is_alive():
                process.kill()
            process.join()
        self._folder.cleanup()


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    environment: dict[str, str] | None = None,
    grouped: bool = True,
    on: str | None = None,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` ranks; returns their results in rank order.

    Without ``grouped`` they have no process group, but what torchrun says of how to make one. ``on``: in place of :data:`kind`.

    ``function``, ``args`` and results must pickle (use NumPy arrays rather than tensors). Raise
    :class:`RankFailed` if a rank raises, dies, or ``timeout`` seconds pass; then no process is left behind.
    """
    environment = dict(environment or {})
    if not grouped:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    world = _World(world_size, environment, grouped, on or kind)
    results = world.call(function, args, timeout)
    world.end()
    return results


class Pool:
    """Ranks that stay for further calls of functions that leave a process as they found it.

    In a fresh process the first iteration of a training run costs as much as the next three. Ranks have the parallel groups of
    one model: others are started where an argument has other ``groups``.
    """

    def __init__(self) -> None:
        self._worlds: dict[str, _World] = {}  # by what they can be used for

    def run(self, function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
        """Return the results as :func:`run_ranks` does. Where a call failed, the next one starts other ranks."""
        use = repr([kind, world_size, *(argument.groups for argument in args if hasattr(argument, "groups"))])
        world = self._worlds.pop(use, None) or _World(world_size, {}, grouped=True, on=kind)
        results = world.call(function, args, timeout)
        self._worlds[use] = world
        if len(self._worlds) > 3:
            self._worlds.pop(next(iter(self._worlds))).end()  # that was not used for longest
        return results

    def close(self) -> None:
        """End the ranks."""
        while self._worlds:
            self._worlds.popitem()[1].end()


def logged(name: str | None = None) -> list[str]:
    """Return a list that gets the messages of this process to the logger of this name."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return told


def each(rank: int, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """``function(rank, *call)`` for each of ``calls``, in the processes of one :func:`run_ranks`: starting them is not free."""
    return [function(rank, *call) for call in calls]
