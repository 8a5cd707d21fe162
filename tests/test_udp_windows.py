"""Exchanges of a device over UDP: in windows through page-locked memory that is bounded, and the values of one piece."""

import dataclasses
import gc
import itertools
import threading
import weakref
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import cut
from megatron_lossy.transport import deadline
from megatron_lossy.transport.staging import Courier, Parcel, Ring
from megatron_lossy.transport.windows import runs, windows
from tests import contract
from tests.in_lab import telescopes
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.test_hooks import BOTH, OVERLAPS, RULES, SETTINGS
from tests.test_udp import HURRIED, assert_replayed
from tests.test_udp_feedback import HURRIED as HURRIED_FEEDBACK
from tests.test_udp_feedback import skips_some
from tests.test_virtual import real_runs, trained
from tests.tiny_gpt import TinyGPT

pytestmark = pytest.mark.shows("over UDP a bucket in windows gives the same values")

#: Room for 4 windows, each a small part of a bucket.
LITTLE = {"udp_memory": 2**16}
WHOLE = dataclasses.replace(BOTH, transport="udp", packet_bytes=256)
CUT = dataclasses.replace(WHOLE, **LITTLE)


def as_on_a_device(rank, function, *args):
    """Let tensors go the way of those on a device, but for the device."""
    deadline.staged = lambda buffer: True
    return function(rank, *args)


def counted(rank, function, *args):
    """The result of ``function``, and the most windows of a bucket."""
    counts, original = [], deadline.windows

    def noted(*called):
        found = list(original(*called))
        counts.extend(map(len, found))
        return found

    with mock.patch.object(deadline, "windows", noted):
        return function(rank, *args), max(counts)


def staged_and_counted(rank, *args):
    return counted(rank, as_on_a_device, *args)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["of a device", "of a CPU"])
def test_windows_change_no_value(way, pool):
    """Every rule, with and without overlap, in single and half precision; the lead too."""
    chosen = [
        (f"{rule} {dtype} {overlap}", {"dtype": dtype, "accumulation": 2, **OVERLAPS[overlap]}, {"grad_recovery": rule})
        for rule, dtype, overlap in (
            ("renormalize", "fp32", "none"),
            ("renormalize", "bf16", "both"),
            *((rule, "fp32", "both") for rule in RULES[1:]),
        )
    ]
    chosen.append(("the lead", {"dtype": "bf16", **OVERLAPS["both"]}, {"param_send": "compensated:0.6"}))
    chosen.append(("no draws", {"dtype": "bf16", **OVERLAPS["none"]}, {"p_grad": 0.0, "p_param": 0.0}))
    run = counted if way == "of a CPU" else staged_and_counted
    cut_runs = [(name, tiny, dataclasses.replace(CUT, **flags)) for name, tiny, flags in chosen]
    whole_runs = [(name, tiny, dataclasses.replace(WHOLE, **flags)) for name, tiny, flags in chosen]
    found = run_ranks(run, 3, real_runs, cut_runs)
    assert min(count for _, count in found) > 8
    assert_same([mine for mine, _ in found], pool.run(real_runs, 3, whole_runs))


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.slow
def test_every_setting_of_megatron(name, pool):
    """Several groups of a process, such as those of experts, share one courier."""
    world, tiny = SETTINGS[name]
    mine = run_ranks(as_on_a_device, world, contract.plain, tiny, CUT, 4)
    theirs = pool.run(contract.plain, world, tiny, WHOLE, 4)
    assert_same(mine, theirs)


@pytest.mark.slow
def test_ranks_of_a_node_exchange_beside_the_windows(pool):
    """Their pieces land outside the gradients, which others' pieces overwrite."""
    tiny = {"dtype": "bf16", **OVERLAPS["both"]}
    whole = dataclasses.replace(WHOLE, lossy_links="inter-node:2")
    mine = run_ranks(as_on_a_device, 4, real_runs, [("", tiny, dataclasses.replace(whole, **LITTLE))])
    assert_same(mine, pool.run(real_runs, 4, [("", tiny, whole)]))


def test_what_was_lost_in_windows_is_replayed_bit_for_bit(tmp_path, pool):
    tiny, steps = TinyGPT(dtype="bf16", **OVERLAPS["both"]), 5
    config = dataclasses.replace(HURRIED, delivery_log=str(tmp_path / "log"), **LITTLE)
    first = run_ranks(as_on_a_device, 2, trained, tiny, config, steps)
    assert_replayed(pool, tmp_path / "log", tiny, first, packet_bytes=256)


@pytest.mark.parametrize("way", ["of a device", "of a CPU"])
def test_all_that_was_sent_in_windows_is_applied_but_for_what_is_kept(way):
    """To the last bit, over integers: a window's report names its losses."""
    config = dataclasses.replace(HURRIED_FEEDBACK, packet_bytes=24, udp_memory=2**16)
    args = (telescopes, config, 12, skips_some)
    found = run_ranks(as_on_a_device, 3, *args) if way == "of a device" else run_ranks(telescopes, 3, *args[1:])
    for told in found:
        assert told["difference"] == 0 and told["lost"] > 0, told


@given(
    shards=st.lists(st.integers(1, 3000), min_size=1, max_size=4),
    packet=st.integers(4, 300),
    size=st.integers(2, 9),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_windows_divide_a_bucket_and_fit(shards, packet, size, dtype):
    memory = 2**16
    units, _ = cut(shards, [dtype.itemsize] * len(shards), "packet", packet)
    numbers = []
    for bucket, found in zip(units, windows(units, [dtype] * len(shards), size, memory), strict=True):
        assert [window.units.start for window in found] == [0, *(window.units.stop for window in found[:-1])]
        assert found[-1].units.stop == bucket.count
        assert sum(window.elements for window in found) == bucket.shard
        for window in found:
            assert window.start == window.units.start * bucket.elements and window.elements > 0
            assert len(found) == 1 or 2 * size * window.elements * dtype.itemsize <= memory // 2
            numbers.append(window.number)
    assert numbers == list(range(len(numbers)))


@given(st.lists(st.integers(-1, 12), max_size=12, unique=True).map(sorted))
def test_runs_cover_ranks_in_their_order(ranks):
    found = runs(ranks)
    assert [rank for group, _ in found for rank in range(group.start, group.stop)] == ranks
    assert [place for _, places in found for place in range(places.start, places.stop)] == list(range(len(ranks)))
    assert all(one.stop < other.start for (one, _), (other, _) in itertools.pairwise(found))


@settings(deadline=None)
@given(sizes=st.lists(st.integers(1, 1300), min_size=1, max_size=40), seed=st.integers(0, 1000))
def test_a_ring_hands_out_no_place_twice(sizes, seed):
    """One thread takes, another gives back, as a courier's two do."""
    ring, random = Ring(4096, pinned=False), np.random.default_rng(seed)
    under_way, lock, taken = [], threading.Semaphore(0), []

    def give_back():
        for number in range(len(sizes)):
            lock.acquire()
            assert (taken[number] == number % 251).all()
            ring.give_back(None)

    thread = threading.Thread(target=give_back, daemon=True)
    thread.start()
    for number, size in enumerate(sizes):
        place = ring.take(size)
        assert place is not None and len(place) >= size
        place.fill_(number % 251)
        taken.append(place)
        under_way.append(number)
        while len(under_way) > 1 or (under_way and random.random() < 0.5):
            under_way.pop(0)
            lock.release()
    for _ in under_way:
        lock.release()
    thread.join(10)
    assert not thread.is_alive()


def test_nobody_waits_for_memory_that_never_comes_back():
    ring = Ring(1024, pinned=False)
    assert ring.take(1024) is not None
    threading.Timer(0.05, ring.give_up).start()
    assert ring.take(512) is None


class Arrived:
    """A transfer that is over: everything arrived."""

    arrived, keep = np.ones((1, 1), dtype=bool), None

    def finish(self, seconds):
        pass


def parcel(value, brought, post=lambda address: Arrived()):
    def bring(arrived, data):
        brought.append(data.tolist())

    shape = torch.Size([1, 2])
    return Parcel([torch.full((1, 2), value)], shape, post, lambda address: None, bring, patience=10.0)


def test_a_courier_goes_on_after_a_failure_and_keeps_no_buffers():
    """Memory that a failed exchange may still write to is not used again."""
    courier, brought, addresses = Courier(torch.device("cpu"), 4096), [], []

    def fails(address):
        addresses.append(address)
        raise ValueError("not later than its last step")

    def succeeds(address):
        addresses.append(address)
        return Arrived()

    bad, good = parcel(1.0, brought, fails), parcel(2.0, brought, succeeds)
    rows = weakref.ref(good.rows[0])
    for one in (bad, good):
        courier.carry(one)
    with pytest.raises(ValueError, match="not later"):
        bad.wait()
    good.wait()
    assert len(brought) == 1 and addresses[0] != addresses[1]
    gc.collect()
    assert rows() is None
