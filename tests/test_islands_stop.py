"""Islands that get a signal, or stand still: all end after the same iteration, and none waits for a late one."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lossy.base import device
from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.mechanisms.islands.world import IslandWorld, Stopping
from tests.ranks import run_ranks
from tests.test_islands_ranks import LATE, SMALL, TWO
from tests.trainer import in_iteration, read_records, train_runs

pytestmark = pytest.mark.shows(
    "islands end after the same iteration, also with datagrams lost", "an island that stands still holds up nobody"
)

DATAGRAMS = {"transport": "udp", "udp_deadline": "50", "udp_peer_timeout": 120.0}
LONG = SMALL | {"train_iters": 400, "eval_iters": 0, "micro_batch_size": 2, "num_layers": 1}


def stand_still(rank: int, folder: str, run: tuple[dict, dict]) -> int:
    """Rank 1 stops itself in its fifth iteration, and rank 0 wakes it after 30 more of its own, of which it returns the number."""
    sleeper = Path(folder, "sleeper")
    if rank == 1:

        def sleep(made: int) -> None:
            if made == 5:
                sleeper.with_suffix(".new").write_text(str(os.getpid()))
                sleeper.with_suffix(".new").rename(sleeper)
                os.kill(os.getpid(), signal.SIGSTOP)

        in_iteration(5, sleep)
        train_runs(rank, run)
        return 0
    slept: list[int] = []

    def count(made: int) -> None:
        if sleeper.exists() and len(slept) < 30:
            slept.append(made)
            if len(slept) == 30:
                os.kill(int(sleeper.read_text()), signal.SIGCONT)

    in_iteration(1, count)
    train_runs(rank, run)
    return len(slept)


@pytest.mark.slow
@pytest.mark.parametrize("delay", [0, 3])
def test_others_go_on_while_an_island_stands_still(delay, data, tmp_path):
    """Its messages are lost, and at the end everybody is where it should be."""
    loss = {**LATE, **DATAGRAMS, "sync_delay": delay}
    run = (LONG | data | {"save": str(tmp_path)}, loss)
    made, _ = run_ranks(stand_still, 2, str(tmp_path), run, grouped=False)
    assert made == 30
    assert [latest_iteration(tmp_path / f"island_{number}") for number in range(2)] == [LONG["train_iters"]] * 2
    records = read_records(tmp_path / "island_0", "train")
    assert max(record.get("loss rate sync-reduce", 0.0) for record in records) == 1.0


def told_to_stop(rank: int, run: tuple[dict, dict]) -> None:
    """The last rank gets a SIGTERM in its fourth iteration."""

    def tell(made: int) -> None:
        if rank == int(os.environ["WORLD_SIZE"]) - 1 and made == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    in_iteration(4, tell)
    train_runs(rank, run)


LOST = {"p_sync": 0.8, "loss_unit": "packet", "packet_bytes": 256}


@pytest.mark.parametrize(
    ("ranks", "settings", "loss"),
    [
        (4, {}, {**LATE, "sync_interval": 2}),
        (2, {}, {**LATE, **LOST}),
        (2, {}, {**LATE, **LOST, **DATAGRAMS}),
        (3, {"global_batch_size": 12}, {**LATE, **DATAGRAMS, "islands": 3}),
        (4, {"pipeline_model_parallel_size": 2, "num_layers": 2}, {**TWO, "async_pipeline": True}),
        (4, {"tensor_model_parallel_size": 2}, LATE),
        (4, {}, {**TWO, "sync_method": "none"}),
    ],
    ids=["torch", "drawn losses", "datagrams", "three", "asynchronous pipeline", "tensor", "alone"],
)
@pytest.mark.slow
def test_islands_stop_after_the_same_iteration(ranks, settings, loss, data, tmp_path):
    """A signal comes to one rank of one of them."""
    config = LONG | data | {"train_iters": 600, "save": str(tmp_path)} | settings
    run_ranks(told_to_stop, ranks, (config, loss | {"save_consensus": True}), grouped=False)
    found = {latest_iteration(tmp_path / f"island_{number}") for number in range(loss["islands"])}
    assert len(found) == 1 and 4 <= found.pop() < 600
    assert latest_iteration(tmp_path / "consensus") is not None


def worlds(islands, store):
    """Return the worlds of the first ranks of ``islands``, which meet in ``store``."""
    return [
        SimpleNamespace(store=lambda *_: store, island=island, islands=islands, rank=0) for island in range(islands)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_all_stop_after_the_same_iteration_whichever_is_told_when(seed):
    """Islands of their own pace, stopped far apart or not at all."""
    random = np.random.default_rng(seed)
    islands, length = int(random.integers(2, 5)), 200
    stoppings = [Stopping(world) for world in worlds(islands, torch.distributed.HashStore())]
    told = {} if seed % 4 == 0 else {int(random.integers(islands)): int(random.integers(1, length)) for _ in range(2)}
    pace = random.uniform(0.0, 0.002, islands)

    def run(island: int) -> tuple[int, int]:
        mine = stoppings[island]
        for iteration in range(1, length + 1):
            if told.get(island) == iteration:
                mine.stop(15)
            number, last = mine.begin()
            assert last == 0 or iteration <= last
            time.sleep(pace[island])
            if number and iteration == last:
                break
        mine.leave()
        return iteration, number

    with ThreadPoolExecutor(islands) as pool:
        ended = list(pool.map(run, range(islands)))
    assert len({iteration for iteration, _ in ended}) == 1, ended
    if not told:
        assert ended[0] == (length, 0)
    else:
        assert ended[0][0] >= min(told.values())


def begin_late(rank: int) -> tuple[int, int]:
    """Stop one island at once, which ends 5 s later than the other; that one begins, with a signal of its own, 5 s later. The world's time is 2 s."""
    world = IslandWorld(2)
    world.open(device.init_process_group, timedelta(seconds=2))
    if rank:
        time.sleep(5)
    stopping = Stopping(world)
    stopping.stop(15)
    while not (known := stopping.begin())[1]:
        time.sleep(0.01)
    if not rank:
        time.sleep(5)
    stopping.leave()
    return known


@pytest.mark.slow
def test_others_are_waited_for_longer_than_for_an_answer():
    first, second = run_ranks(begin_late, 2, grouped=False)
    assert first == second and first[0] == 15


def leave_late(rank: int) -> float:
    """Let the first rank of one of two islands finish 5 s later; the world's time is 2 s."""
    world = IslandWorld(2)
    world.open(device.init_process_group, timedelta(seconds=2))
    stopping = Stopping(world)
    began = time.monotonic()
    if rank == 2:
        time.sleep(5)
    stopping.leave()
    return time.monotonic() - began


@pytest.mark.slow
def test_ranks_of_an_island_that_ends_early_wait_as_its_first_does():
    assert min(run_ranks(leave_late, 4, grouped=False)) >= 4


def test_what_goes_wrong_between_islands_is_raised_by_the_next_iteration():
    class Broken:
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("connection closed by peer")

    [world, _] = worlds(2, Broken())
    stopping = Stopping(world)
    stopping._thread.join()
    with pytest.raises(RuntimeError, match="closed by peer"):
        stopping.begin()
    with pytest.raises(RuntimeError, match="closed by peer"):
        stopping.leave()
