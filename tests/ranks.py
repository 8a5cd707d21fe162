"""Run a function on several real gloo ranks, in fresh processes that start quickly.

Importing torch and megatron-core costs seconds per process. A fork server imports them once, and each rank is
forked from it: fresh state for every test at the price of a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

# Oversubscribed cores crawl, and sums must not depend on the number of threads.
os.environ["OMP_NUM_THREADS"] = "1"

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["tests.preload"])


class RankFailed(AssertionError):
    """A rank raised or died; the text holds every failed rank's traceback."""


def _rank_main(connection, function, rank, world_size, store, args, environment, grouped):
    os.environ.update(
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_WORLD_SIZE": str(world_size),
            **environment,
        }
    )
    try:
        import torch

        torch.set_num_threads(1)
        if grouped:
            address = f"file://{store}"
            torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=world_size)
        result = function(rank, *args)
        if grouped:
            torch.distributed.barrier()
        connection.send((True, result))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    finally:
        connection.close()
        os._exit(0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120,
    environment: dict[str, str] | None = None,
    grouped: bool = True,
) -> list[Any]:
    """Call ``function(rank, *args)`` on ``world_size`` gloo ranks; returns their results in rank order.

    Without ``grouped`` they have no process group, but what torchrun says of how to make one.

    ``function``, ``args`` and results must pickle (use NumPy arrays rather than tensors). Raises
    :class:`RankFailed` if a rank raises, dies, or ``timeout`` seconds pass; then no process is left behind.
    """
    environment = dict(environment or {})
    if not grouped:
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        ranks = []
        for rank in range(world_size):
            parent, child = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(child, function, rank, world_size, store, args, environment, grouped),
                daemon=True,
            )
            process.start()
            child.close()
            ranks.append((process, parent))
        deadline = time.monotonic() + timeout
        results: list[Any] = [None] * world_size
        errors: dict[int, str] = {}
        waiting = set(range(world_size))
        while waiting:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                errors.update(dict.fromkeys(waiting, f"no result after {timeout} s"))
                break
            pipes = {ranks[rank][1]: rank for rank in waiting}
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
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    errors[rank] = value
        for process, pipe in ranks:
            if process.is_alive():
                process.join(timeout=0 if errors else 10)
            if process.is_alive():
                process.kill()
            process.join()
            pipe.close()
        if errors:
            raise RankFailed("\n".join(f"rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
        return results


def each(rank: int, function: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """``function(rank, *call)`` for each of ``calls``, in the processes of one :func:`run_ranks`: starting them is not free."""
    return [function(rank, *call) for call in calls]
