"""Ranks of several islands meet at the store of one of them, and an epoch that nobody can open is said to be one."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_lossy.base.exchange import Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.between_members import BetweenMembers
from megatron_lossy.mechanisms.islands.carrying import Among
from megatron_lossy.mechanisms.islands.elastic.meeting_place import NotMet, meet
from megatron_lossy.mechanisms.islands.elastic.membership import Placed
from megatron_lossy.mechanisms.islands.elastic.opening import Opener, Opening
from megatron_lossy.mechanisms.islands.epochs import Epoch, Incarnation, Member
from megatron_lossy.mechanisms.islands.mean import InMemory
from megatron_lossy.transport.settings import settings_of
from megatron_lossy.transport.udp.engine import Engine

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


@pytest.mark.parametrize("transport", ["torch", "udp"])
@pytest.mark.parametrize("roles", [("send", "send", "send"), ("send", "listen", "send")], ids=" ".join)
def test_members_of_an_epoch_get_the_mean_of_islands_in_one_process(place, roles, transport):
    """To the bit, over gloo and datagrams; one of four islands is away."""
    lost = {"p_sync": 0.3, "loss_unit": "packet", "packet_bytes": 64}
    config = LossyConfig(islands=4, sync_method="parameters", transport=transport, **lost)
    members = tuple(Member(slot, Incarnation(1), role) for slot, role in zip((0, 2, 3), roles, strict=True))
    epoch, stream, sent = Epoch(members, 0), Stream("islands"), torch.randn(4, 101)
    together = InMemory(config, stream, None)
    together.among(epoch.senders, epoch.slots)
    expected = together.begin(0, sent.clone()).wait()
    placed = Placed(0, epoch, dict.fromkeys(epoch.slots, place), 1.0, 30.0)
    engines = {slot: Engine(settings_of(config), "127.0.0.1") if transport == "udp" else None for slot in epoch.slots}
    failed = []

    def mean_of(slot):
        opener = Opener(config, slot, 0, [sent.shape[1]], engines[slot], lambda *what: failed.append(what))
        among = Among(epoch, slot, *opener(placed, lambda: False))
        own = {"among": lambda: among, "breaks": lambda *what: failed.append(what), "loses": failed.append}
        crossing = BetweenMembers(config, stream, slot, None, lambda delivery: None, shard=0, **own)
        mean = crossing.begin(0, sent[slot : slot + 1].clone()).wait()
        crossing.close()
        return mean, among

    with ThreadPoolExecutor(3) as pool:
        found = dict(zip(epoch.slots, pool.map(mean_of, epoch.slots), strict=True))
    assert not failed and not expected.arrived.all()
    for slot, (mean, among) in found.items():
        arrived = expected.arrived[slot]
        assert arrived.any() and torch.equal(mean.arrived[0], arrived)
        assert torch.equal(mean.values[arrived], expected.values[arrived])
        among.close()
        among.wait_closed()
    for engine in engines.values():
        if engine is not None:
            engine.close(linger=0.0)
