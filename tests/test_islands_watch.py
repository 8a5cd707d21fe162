"""Islands that poll a real coordinator, which dies and comes back with nothing."""

import os
import re
import secrets
import signal
import time

import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands import first_rank
from megatron_lossy.mechanisms.islands.first_rank import FirstRank
from megatron_lossy.mechanisms.islands.membership.messages import Beat, read, slot_of
from megatron_lossy.mechanisms.islands.membership.protocol import Local, Times
from megatron_lossy.mechanisms.islands.membership.store import open_store
from tests.coordinator import KEY, Coordinator
from tests.islands_simulated import Memory

pytest.importorskip("cryptography")
pytestmark = pytest.mark.shows("islands agree at a coordinator that dies and comes back empty", device=False)

TIMES = Times(poll=0.1, silent=2.0, connect=1.0, quiet=1.0, alone=5.0, join=60.0, read=0.3)


ELASTIC = {"rendezvous": "etcd://nobody/run", "island": 0}


class Launch:
    """The first rank of an island, which reaches all others. ``exchange``: made so far."""

    def __init__(self, slot, store, flags="f", islands=3, exchange=0):
        self.config = LossyConfig(islands=islands, sync_method="parameters", island_join=60.0, **ELASTIC)
        self._slot, self.exchange, self._connections = slot, exchange, self
        self.pairs, self.listen, self.among = [], lambda: f"{secrets.token_hex(4)}:{slot}", lambda entry: {}
        self.flags = lambda: {"--flag": flags}
        self.first = FirstRank(self, f"{slot}/{secrets.token_hex(4)}", store, 0)
        self.first.begin()

    def local(self):
        plan = self.first._plan
        more = {"attempt": plan.attempt, "connected": plan.connect}
        return Local(time.time(), exchange=self.exchange, seconds=0.01, ready=True, answers=False, **more)

    @property
    def entry(self):
        return self.first._island.entry

    @property
    def slots(self):
        return [] if self.entry is None else [slot_of(one) for one in self.entry.members]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(first_rank, "TIMES", TIMES)


def wait(there):
    while not there():
        time.sleep(0.05)


def test_a_run_at_a_coordinator_that_loses_all(tmp_path, caplog):
    server = Coordinator(tmp_path)
    launches = [Launch(slot, open_store(server.url(), KEY)) for slot in range(3)]
    try:
        wait(lambda: all(one.slots == [0, 1, 2] for one in launches))
        entry = launches[0].entry
        taken = Launch(1, open_store(server.url(), KEY))
        wrong = Launch(2, open_store(server.url(), KEY), "other")
        wait(lambda: taken.first.ends and wrong.first.ends)
        assert "is alive" in str(taken.first.ends)
        assert re.fullmatch("--flag other: island . at .* has f; all must be alike", str(wrong.first.ends))
        server.end(signal.SIGKILL)
        wait(lambda: all(one.first.why for one in launches))
        os.remove(tmp_path / "coordinator.journal")
        again = Coordinator(tmp_path, server.port)
        wait(lambda: not any(one.first.why for one in launches))
        wait(lambda: again_has(again, entry))
        for text in ("going on as before", "answers again"):
            assert sum(line.endswith(text) for line in caplog.messages) >= 3
        assert all(one.entry == entry for one in launches)
        launches[1].first.close()
        wait(lambda: launches[0].slots == launches[2].slots == [0, 2])
        assert launches[0].entry.number > entry.number
        assert launches[0].entry.parent == entry.ident
        launches[1] = Launch(1, open_store(again.url(), KEY))  # which need not wait until the one before is silent
        wait(lambda: all(one.slots == [0, 1, 2] for one in launches))
        wait(lambda: len(launches[0].entry.senders) == 3)
    finally:
        for one in launches:
            one.first.close()
    again.end(signal.SIGTERM)


def again_has(server, entry):
    text = open_store(server.url(), KEY).get("now/epoch")
    return text is not None and entry.nonce in text


def test_nobody_follows_an_island_that_has_leapt_to_where_the_others_are_about_to_be():
    store = Memory()
    ahead, behind = (Launch(slot, store, islands=2, exchange=made) for slot, made in enumerate((100, 10)))

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
