"""Ranks that torchrun starts again, beside one store that outlives them (``megatron_lossy/device/attempt.py``)."""

import os
import time
from datetime import timedelta

import pytest
import torch

from tests.ranks import run_ranks

pytestmark = pytest.mark.shows("ranks that torchrun starts again do not look for those before them", device=False)

WAIT = timedelta(seconds=60)


@pytest.fixture
def served():
    """The store that torchrun serves in its own process, over all attempts."""
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def attempt(rank: int, port: int, late: list[float], islands: int, wait: timedelta = WAIT) -> list[float]:
    """What a process group of this attempt adds up, and one between islands. A rank comes ``late`` by so many seconds."""
    from megatron_lossy import device
    from megatron_lossy.mechanisms.islands.world import IslandWorld

    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device.prepare()
    time.sleep(late[rank])
    total = torch.ones(1)
    if islands == 1:
        device.init_process_group(timeout=wait)
        torch.distributed.all_reduce(total)
        return total.tolist()
    world = IslandWorld(islands)
    world.open(device.init_process_group, wait)
    torch.distributed.all_reduce(total)
    return [*total.tolist(), *world.meet("test").total(torch.ones(1)).tolist()]


@pytest.mark.parametrize(("islands", "sums"), [(1, [4]), (2, [2, 2])])
def test_ranks_do_not_look_for_those_before_them(served, islands, sums):
    """Whoever comes first in an attempt finds in the store what ranks wrote that are gone."""
    for late in ([0, 0, 0, 0], [1.5, 0, 0.5, 0], [0, 1.5, 0, 0.5]):
        got = run_ranks(attempt, 4, served.port, late, islands, grouped=False)
        assert got == [sums] * 4, late


def alone(rank: int, port: int, who: int) -> str:
    os.environ |= {"RANK": str(who), "WORLD_SIZE": "3"}
    try:
        attempt(0, port, [0], 1, timedelta(seconds=1))
    except torch.distributed.DistStoreError as error:
        return str(error)
    return "no error"


def test_a_rank_that_gives_up_says_for_whom_it_waited_and_harms_nobody(served):
    assert run_ranks(alone, 1, served.port, 0, grouped=False) == ["ranks 1, 2 did not come within 1 s"]
    assert run_ranks(alone, 1, served.port, 1, grouped=False) == ["rank 0 did not come within 1 s"]
    assert run_ranks(attempt, 3, served.port, [0.5, 0, 0], 1, grouped=False) == [[3]] * 3
    assert run_ranks(alone, 1, served.port, 2, grouped=False) == ["rank 0 did not come within 1 s"]
    assert run_ranks(attempt, 3, served.port, [0, 0, 0.5], 1, grouped=False) == [[3]] * 3
