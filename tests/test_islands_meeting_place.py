"""Ranks of several islands meet at the store of one of them, and an epoch that nobody can open is said to be one."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_lossy.mechanisms.islands.elastic.meeting_place import NotMet, meet
from megatron_lossy.mechanisms.islands.elastic.membership import Placed
from megatron_lossy.mechanisms.islands.elastic.opening import Opening
from megatron_lossy.mechanisms.islands.epochs import Epoch, Incarnation, Member

pytestmark = pytest.mark.shows("islands that are launches of their own meet", device=False)


@pytest.fixture
def server():
    return dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)


@pytest.fixture
def place(server):
    return "127.0.0.1", server.port


def test_the_one_that_comes_late_is_waited_for(place):
    came = []

    def come(own, after):
        time.sleep(after)
        meet(place, "epoch", own, "012", 30.0, 5.0, lambda: False)
        came.append((own, time.monotonic()))

    began = time.monotonic()
    threads = [threading.Thread(target=come, args=[own, after]) for own, after in (("0", 0.0), ("1", 0.0), ("2", 0.7))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(own for own, _ in came) == ["0", "1", "2"]
    assert all(at - began >= 0.7 for _, at in came)


@pytest.mark.parametrize(
    ("coming", "given_up", "why"), [(0.3, False, "^1, 2 did not come within 0.3 s"), (30.0, True, "given up")]
)
def test_those_that_do_not_come_are_named(place, coming, given_up, why):
    with pytest.raises(NotMet, match=why):
        meet(place, "epoch", "0", "012", coming, 5.0, lambda: given_up)


def test_an_epoch_that_nobody_can_open_has_failed():
    placed = Placed(0, Epoch((Member(0, Incarnation(1), "send"),), 10), {}, 1.0, 7.0)
    may_fail = threading.Event()

    def open_(placed, given_up):
        may_fail.wait()
        raise NotMet("they do not come")

    opening = Opening(placed, 0, open_)
    assert not opening.failed
    may_fail.set()
    assert opening.among(60.0) is None and opening.failed and not opening.usable
