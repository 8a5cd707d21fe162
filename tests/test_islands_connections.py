"""Connections between islands, as streams and as datagrams: what one does not send in time is lost, and nothing else."""

from __future__ import annotations

import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands import connections as module
from megatron_lossy.mechanisms.islands import first_rank
from megatron_lossy.mechanisms.islands.carrying import EpochView, Lane
from megatron_lossy.mechanisms.islands.connections import Connections
from megatron_lossy.mechanisms.islands.copying import PART, HostCopy, receive_copy, send_copy
from megatron_lossy.mechanisms.islands.elastic import ElasticIslands
from megatron_lossy.mechanisms.islands.membership.messages import Entry, Preparation, write
from megatron_lossy.mechanisms.islands.monitor import Diary
from megatron_lossy.mechanisms.islands.world import ElasticWorld
from megatron_lossy.transport.leaving import PeerLost
from megatron_lossy.transport.settings import settings_of
from megatron_lossy.transport.stream.host import Host
from megatron_lossy.transport.udp import Channel, Engine
from tests.islands_simulated import Memory
from tests.udp_world import send_only

pytestmark = pytest.mark.shows("islands lose only what one does not send in time", device=False)

ISLANDS, SIZE = 3, 300
MEMBERS = tuple(f"{slot}/0000000{slot}" for slot in range(ISLANDS))
ENTRY = Entry(7, MEMBERS, MEMBERS, 0, 0, "", "aaaa")


class Islands:
    """Islands in one process that connect with each other. ``keys``: by slot, another key file."""

    def __init__(self, monkeypatch, transport, patience=60.0, keys=None, slots=range(ISLANDS)):
        flags = {"islands": ISLANDS, "sync_method": "parameters", "loss_unit": "packet", "packet_bytes": 102}
        self.config = LossyConfig(**flags, transport=transport)
        object.__setattr__(self.config, "island_patience", patience)
        self.store, self.ends, self.lost = Memory(), [], []
        self.store.put("now/prepare", write(Preparation(ENTRY.number, MEMBERS[0], ENTRY.nonce, MEMBERS)))
        self.all = {}
        for slot in slots:
            settings = {} if keys is None else {"udp_key_file": keys[slot]}
            own = LossyConfig(**flags, transport=transport, **settings)
            end = (Engine if transport == "udp" else Host)(settings_of(own), "127.0.0.1")
            self.ends.append(end)
            monkeypatch.setattr(module, "end_for", lambda *_, end=end: end)
            self.all[slot] = Connections(self.config, self.store, MEMBERS[slot], 0, 1, [SIZE], "127.0.0.1", 0.1)
        self.pool = ThreadPoolExecutor(ISLANDS)

    def pairs(self, slot):
        return self.all[slot].among(ENTRY)

    def connect(self):
        for slot, one in self.all.items():
            others = {MEMBERS[other] for other in self.all if other != slot}
            while not one.connected[1] >= others:
                time.sleep(0.01)

    def exchange(self, number, slots, value):
        """By slot, what it got of the pieces [3, 100] that all send, and what arrived of each, in both halves."""

        def one(slot):
            diary = Diary(slot)
            diary.note = lambda event, with_island, **_: self.lost.append((slot, with_island))
            among = EpochView(ENTRY, 0, slot, self.all[slot], diary)
            lane = Lane(self.config, among, slot, 0, number, diary)
            pieces = torch.full((ISLANDS, SIZE // ISLANDS), float(value + slot))
            received, arrived = lane.scatter(pieces)
            gathered, came = lane.gather(received[slot])
            lane.end()
            return received, arrived.all(axis=1), gathered, came.all(axis=1)

        return dict(zip(slots, self.pool.map(one, slots)))

    def close(self):
        list(self.pool.map(Connections.close, self.all.values()))
        self.pool.shutdown()
        for end in self.ends:
            end.close()


@pytest.fixture
def islands(monkeypatch):
    made = []

    def islands(*arguments, **options):
        made.append(Islands(monkeypatch, *arguments, **options))
        return made[-1]

    yield islands
    for one in made:
        one.close()


both = pytest.mark.parametrize("transport", ["stream", "udp"])


@both
def test_all_get_what_all_send(islands, transport):
    run = islands(transport)
    run.connect()
    for number in (0, 1, 5):  # an island may leave some out
        for received, arrived, gathered, came in run.exchange(number, range(ISLANDS), 10 * number).values():
            assert arrived.all() and came.all()
            for rows in (received, gathered):
                assert rows[:, 0].tolist() == [10 * number, 10 * number + 1, 10 * number + 2]
    assert not run.lost


@both
def test_who_is_late_is_waited_for_once_and_counts_again_when_it_is_in_time(islands, transport):
    run = islands(transport, patience=0.5)
    run.connect()
    for number in range(4):
        for received, arrived, gathered, came in run.exchange(number, (0, 2), 10 * number).values():
            for rows, there in ((received, arrived), (gathered, came)):
                np.testing.assert_array_equal(there, [True, False, True])
                assert rows[:, 0].tolist() == [10 * number, 0, 10 * number + 2]
    assert sorted(run.lost) == [(0, 1), (2, 1)]  # noted once
    assert all(run.pairs(slot)[1].patience == module._LEAST for slot in (0, 2))
    for one in (0, 2):  # so that machines may be busy
        run.pairs(one)[1].patience = 60.0
    for _, arrived, _, came in run.exchange(9, range(ISLANDS), 0).values():
        assert arrived.all() and came.all()


@both
def test_who_ends_costs_nobody_else_a_message(islands, transport):
    run = islands(transport)
    run.connect()
    run.all.pop(1).close()
    for _, arrived, _, came in run.exchange(0, (0, 2), 0).values():
        np.testing.assert_array_equal(arrived, [True, False, True])
        np.testing.assert_array_equal(came, [True, False, True])


@both
def test_a_copy_and_sums_and_an_entry_cross_by_the_same_connection(islands, transport, monkeypatch):
    """Whole, although every 50th datagram is lost at first."""
    send = Channel.send

    def losing(channel, phase, step, bucket, *arguments):
        send_only(channel, phase, bucket, np.arange(channel._units[phase][bucket]) % 50 != 7)
        return send(channel, phase, step, bucket, *arguments)

    monkeypatch.setattr(Channel, "send", losing)
    run = islands(transport)
    run.connect()
    there, back = run.pairs(0)[1], run.pairs(1)[0]
    values = {"weights": torch.randn(PART // 3), "step": 3.0}
    held = {"weights": HostCopy(values["weights"]), "step": 3.0}
    sent, received = count(1), count(1)
    digest = run.pool.submit(send_copy, lambda part: there.put("copy", next(sent), part, 60.0), held, 12)
    copy = receive_copy(lambda part: back.get("copy", next(received), part, 60.0))
    assert (copy.made, copy.digest, copy.values["step"]) == (12, digest.result(), 3.0)
    assert torch.equal(copy.values["weights"], values["weights"])
    own = [torch.randn(PART // 4 + 5) for _ in range(2)]
    sums = [
        run.pool.submit(run.all[slot].swap, {1 - slot: run.pairs(slot)[1 - slot]}, 9, own[slot]) for slot in range(2)
    ]
    for slot, one in enumerate(sums):
        assert torch.equal(one.result()[1 - slot], own[1 - slot])
    assert back.told() is None
    there.say(ENTRY)
    there.say(ENTRY)
    while back.told() is None:
        time.sleep(0.01)
    assert back.told() == ENTRY


@both
def test_who_has_another_key_is_never_connected_and_that_is_said(islands, transport, tmp_path):
    keys = []
    for slot in range(ISLANDS):
        keys.append(tmp_path / f"{slot}")
        keys[-1].write_bytes(bytes([slot == 1]) * 32)
    run = islands(transport, keys=[str(one) for one in keys])
    others = {0: MEMBERS[2], 2: MEMBERS[0]}
    for slot, other in others.items():
        while run.all[slot].connected[1] != {other} or "another key" not in run.pairs(slot)[1].why:
            time.sleep(0.01)
    for _, _, _, came in run.exchange(0, (0, 2), 0).values():
        np.testing.assert_array_equal(came, [True, False, True])


@both
def test_a_lost_connection_opens_again(islands, transport):
    run = islands(transport, slots=(0, 1))
    run.connect()
    pair = run.pairs(0)[1]
    channel = pair._channel
    channel.lose(1 - pair._place)
    while pair._channel in (None, channel) or not run.pairs(1)[0].connected:
        time.sleep(0.01)
    with pytest.raises(PeerLost):
        pair.get("copy", 1, torch.zeros(10, dtype=torch.uint8), 0.1)


@pytest.mark.ranks
@both
def test_an_island_that_has_ended_answers_no_more(islands, transport, monkeypatch):
    """A forked child, as a loader starts, does not answer for it, and begins without an error."""
    run = islands(transport, slots=(0,))
    address = run.all[0].listen()
    assert first_rank._listens(address)
    there, begun = os.pipe()
    errors = []
    monkeypatch.setattr(sys, "unraisablehook", errors.append)
    child = os.fork()
    if not child:
        os.write(begun, b"%d" % len(errors))
        signal.pause()
    try:
        assert os.read(there, 1) == b"0"
        run.all[0].close()
        run.all[0].host.close()
        assert first_rank._listens(address) is False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_one_that_waits_until_the_run_is_where_it_is_sends_nothing_before(monkeypatch):
    """Else an entry would begin where it is, far ahead of the others."""
    flags = {"islands": 2, "sync_method": "parameters", "island_rejoin": "listen"}
    config = LossyConfig(**flags, rendezvous="etcd://localhost:1/run", island=0)
    part, ready = ElasticIslands(config, ElasticWorld(2, 0)), []
    entry = Entry(1, ("0/0000000a", "1/0000000b"), ("1/0000000b",), 5, 5, "", "aa")

    def near(*_):
        ready.append(part.local().ready)
        return True

    monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda _: None)
    part._entered, part._known, part._run = True, [(entry, "copies")], SimpleNamespace(iteration=90, steps=None)
    part._first_rank = SimpleNamespace(found=part._known, near=near, began=0)
    part._connections = SimpleNamespace(connected=("", set()), pairs=[])
    part._standing.enter(90)
    assert part.catch_up(90) == 90
    assert ready == [False] and part.local().ready
