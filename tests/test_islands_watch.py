"""Islands that poll a real coordinator, which dies and comes back with nothing."""

import os
import secrets
import signal
import time

import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.elastic import first_rank
from megatron_lossy.mechanisms.islands.elastic.first_rank import FirstRank
from megatron_lossy.mechanisms.islands.membership.messages import Beat, Slot, read, slot_of
from megatron_lossy.mechanisms.islands.membership.protocol import Island, Local, Plan, Times
from megatron_lossy.mechanisms.islands.membership.store import open_store
from megatron_lossy.mechanisms.islands.membership.watch import Watch
from tests.coordinator import KEY, Coordinator
from tests.islands_simulated import Memory

pytest.importorskip("cryptography")
pytestmark = pytest.mark.shows("islands agree at a coordinator that dies and comes back empty", device=False)

TIMES = Times(poll=0.1, silent=2.0, connect=1.0, quiet=1.0, alone=5.0, join=60.0, read=0.3)


ELASTIC = {"rendezvous": "etcd://nobody/run", "island": 0}


class Launch:
    """An island of three that reaches all others, and does nothing else."""

    def __init__(self, url, slot, flags="f"):
        me = f"{slot}/{secrets.token_hex(4)}"
        self.island = Island(Slot(me, "host", "host:1", flags), 3, TIMES, time.monotonic())
        self.lines, self.plan, self.leaves = [], None, False
        self.watch = Watch(open_store(url, KEY), self.island, self.local, self.act, self.lines.append)

    def local(self):
        plan = self.plan or Plan()
        more = {"attempt": plan.attempt, "connected": plan.connect}
        return Local(time.time(), ready=True, leaves=self.leaves, answers=False, **more)

    def act(self, plan):
        self.plan = plan

    @property
    def slots(self):
        entry = self.island.entry
        return [] if entry is None else [slot_of(one) for one in entry.members]

    def close(self):
        self.leaves = True
        self.watch.close()


def wait(there):
    while not there():
        time.sleep(0.05)


def test_a_run_at_a_coordinator_that_loses_all(tmp_path):
    server = Coordinator(tmp_path)
    launches = [Launch(server.url(), slot) for slot in range(3)]
    try:
        wait(lambda: all(one.slots == [0, 1, 2] for one in launches))
        entry = launches[0].island.entry
        taken, wrong = Launch(server.url(), 1), Launch(server.url(), 2, "other flags")
        wait(lambda: all(one.plan is not None and one.plan.refused for one in (taken, wrong)))
        assert "is alive" in taken.plan.refused and "has other flags" in wrong.plan.refused
        server.end(signal.SIGKILL)
        wait(lambda: all(one.watch.why for one in launches))
        os.remove(tmp_path / "coordinator.journal")
        again = Coordinator(tmp_path, server.port)
        wait(lambda: not any(one.watch.why for one in launches))
        wait(lambda: again_has(again, entry))
        for one in launches:
            assert one.lines[0].endswith("going on as before") and "answers again" in one.lines[-1]
            assert one.island.entry == entry
        launches[1].close()
        wait(lambda: launches[0].slots == launches[2].slots == [0, 2])
        assert launches[0].island.entry.number > entry.number
        assert launches[0].island.entry.parent == entry.ident
        launches[1] = Launch(again.url(), 1)  # which need not wait until the one before is silent
        wait(lambda: all(one.slots == [0, 1, 2] for one in launches))
        wait(lambda: len(launches[0].island.entry.senders) == 3)
    finally:
        for one in launches:
            one.close()
    again.end(signal.SIGTERM)


def again_has(server, entry):
    text = open_store(server.url(), KEY).get("now/epoch")
    return text is not None and entry.nonce in text


class Trained:
    """The training of an island that reaches all others, for its first rank. ``exchange``: made so far."""

    def __init__(self, slot, store, exchange):
        self.config = LossyConfig(islands=2, sync_method="parameters", island_join=0.0, **ELASTIC)
        self._slot, self.exchange, self._connections = slot, exchange, self
        self.pairs, self.listen, self.flags, self.among = [], lambda: f"host:{slot}", dict, lambda entry: {}
        self.first = FirstRank(self, f"{slot}/{secrets.token_hex(4)}", store, 0)
        self.first.begin(store)

    def local(self):
        plan = self.first._plan
        more = {"attempt": plan.attempt, "connected": plan.connect}
        return Local(time.time(), exchange=self.exchange, seconds=0.01, ready=bool(self.first.found), **more)


def test_nobody_follows_an_island_that_has_leapt_to_where_the_others_are_about_to_be(monkeypatch):
    monkeypatch.setattr(first_rank, "TIMES", TIMES)
    store = Memory()
    ahead, behind = Trained(0, store, 100), Trained(1, store, 10)

    def beats():
        return read(Beat, store.get("now/beat/1")).count

    try:
        wait(lambda: behind.first.jump(10))
        behind.exchange = behind.first.jump(10)
        assert behind.exchange > 100 + 2
        before = beats()
        wait(lambda: beats() > before + 5)
        assert ahead.first._plan.run == 100 and ahead.first.jump(100) == 0
        ahead.exchange = behind.exchange
        behind.exchange += 50
        wait(lambda: ahead.first.jump(ahead.exchange))  # it really is behind now
    finally:
        ahead.first.close()
        behind.first.close()
