"""Logs of exchanges of islands that came and went by themselves: lives, histories that were left, and what is refused."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.exchange_log import packed, unpacked
from megatron_lossy.mechanisms.islands.recorded import Recorded

pytestmark = pytest.mark.shows("islands that are launches of their own: made again from their logs")

INTERVAL = 5


@given(arrays.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 30))), st.integers(0, 9))
def test_what_arrived_is_packed(arrived, more):
    """More units than there were have not arrived, unless all did."""
    found = unpacked(json.loads(json.dumps(packed(arrived))), arrived.shape[1] + more)
    np.testing.assert_array_equal(found[:, : arrived.shape[1]], arrived)
    for row, there in zip(found[:, arrived.shape[1] :], arrived):
        assert not row.any() or there.all()


class Logs:
    """Logs of islands of ``ranks``, below ``folder``, of a run with an exchange every :data:`INTERVAL` iterations."""

    def __init__(self, folder, islands=2, ranks=1):
        self.folder, self.islands, self.ranks = folder, islands, ranks
        self._begun = 100

    def write(self, slot, *lines, ranks=None):
        folder = self.folder / f"island_{slot}"
        folder.mkdir(exist_ok=True)
        for rank in range(self.ranks) if ranks is None else ranks:
            with open(folder / f"_exchanges_{rank}.jsonl", "a") as file:
                file.writelines(json.dumps(line) + "\n" for line in lines)

    def enter(self, slot, at, now, **flags):
        self._begun += 1
        self.event(slot, now, "enters", at=at, begun=self._begun, ranks=self.ranks, flags=flags)

    def event(self, slot, now, event, **more):
        self.write(slot, {"t": now, "event": event, **more})

    def exchange(self, slot, number, senders, came=None, ranks=None, upto="means"):
        """``came``: from each sender; default all."""
        made, arrived = (number + 1) * INTERVAL, [1] * len(senders) if came is None else came
        lines = [{"t": made, "exchange": number, "shard": 0, "what": "begins", "member": True, "senders": senders}]
        for what in ("pieces", "means"):
            lines.append({"t": made, "exchange": number, "shard": 0, "what": what, "arrived": arrived})
        self.write(slot, *lines[: {"begins": 1, "pieces": 2, "means": 3}[upto]], ranks=ranks)

    def together(self, numbers, slots):
        for number in numbers:
            for slot in slots:
                self.exchange(slot, number, list(slots))

    def read(self, **flags):
        config = LossyConfig(islands=self.islands, sync_method="parameters", sync_interval=INTERVAL, **flags)
        return Recorded(str(self.folder), config)

    def trains(self, found, slot):
        """The iterations that an island made, of those of the run."""
        record = found.islands[slot]
        return [iteration for iteration in range(1000) if record.life(iteration) is not None]


@pytest.fixture
def logs(tmp_path):
    return Logs(tmp_path)


def test_a_killed_island_trains_until_its_last_exchange_and_goes_on_with_what_it_had_saved(logs):
    for slot in range(2):
        logs.enter(slot, 0, 0)
    logs.together(range(4), (0, 1))  # 20 iterations
    logs.exchange(0, 4, [0])
    logs.enter(1, 22, 40)  # its checkpoint is two iterations later than its last exchange
    logs.event(1, 40, "goes on", at=22)
    logs.event(1, 40, "gives up")
    for number in range(5, 12):
        logs.exchange(0, number, [0])
    logs.exchange(1, 8, [1])
    logs.event(1, 45, "copied", source=0, made=40, weights="w")
    found = logs.read()
    assert logs.trains(found, 0) == list(range(60))
    assert logs.trains(found, 1) == [*range(22), *range(40, 45)]
    assert found.needed == {(1, 22): 40, (0, 40): 45}
    assert [one["event"] for one in found.islands[1].at(40)] == ["enters", "goes on", "gives up"]
    assert found.takers(0, 3, 1, "pieces") == 2 and found.takers(0, 4, 0, "means") == 1
    assert found.end == 60


def test_an_exchange_that_one_rank_alone_has_begun_was_trained_for(tmp_path):
    logs = Logs(tmp_path, ranks=2)
    for slot in range(2):
        logs.enter(slot, 0, 0)
    logs.together(range(2), (0, 1))
    logs.exchange(0, 2, [0, 1])
    logs.exchange(1, 2, [0, 1], ranks=[1])  # the other one was in its optimizer when both were killed
    with pytest.raises(
        UsageError, match="pieces of island 1 arrived at island 0 in exchange 2, but are not in island_1"
    ):
        logs.read()  # of rank 0, which had not sent
    (tmp_path / "island_0" / "_exchanges_0.jsonl").write_text("")
    logs.write(0, {"t": 0, "event": "enters", "at": 0, "begun": 101, "ranks": 2, "flags": {}}, ranks=[0])
    for number, came in enumerate(([1, 1], [1, 1], [1, 0])):
        logs.exchange(0, number, [0, 1], came, ranks=[0])
    found = logs.read()
    assert logs.trains(found, 1) == list(range(15)) and found.takers(1, 2, 1, "pieces") == 2


def test_after_all_have_died_the_history_that_was_left_is_cut(logs):
    """Also at an island that comes back later than the others, or never."""
    for slot in range(2):
        logs.enter(slot, 0, 0)
    logs.together(range(8), (0, 1))  # both die at 40
    logs.enter(0, 20, 20)
    for number in range(4, 10):
        logs.exchange(0, number, [0])
    found = logs.read()
    assert logs.trains(found, 0) == list(range(50))
    assert logs.trains(found, 1) == list(range(20))
    assert found.takers(0, 6, 0, "pieces") == 1


def test_who_goes_on_alone_after_the_end_is_another_run(logs):
    for slot in range(2):
        logs.enter(slot, 0, 0)
    logs.together(range(4), (0, 1))
    logs.event(0, 20, "leaves", weights="w")
    logs.enter(1, 10, 10)
    logs.exchange(1, 2, [1])
    with pytest.raises(UsageError, match="island 1 began again at iteration 10, after island 0 had gone on from there"):
        logs.read()


def test_half_of_a_last_line_is_what_a_death_has_left(logs):
    for slot in range(2):
        logs.enter(slot, 0, 0)
    logs.together(range(2), (0, 1))
    path = logs.folder / "island_1" / "_exchanges_0.jsonl"
    with open(path, "a") as file:
        file.write('{"t": 15, "exch')
    assert logs.trains(logs.read(), 1) == list(range(10))
    with open(path, "a") as file:
        file.write('\n{"t": 15, "event": "gives up"}\n')
    with pytest.raises(UsageError, match=r"island_1/_exchanges_0.jsonl, line 8: is no JSON"):
        logs.read()


@pytest.mark.parametrize(
    ("flags", "lines", "why"),
    [
        ({}, [], "is no log of a run: has no _exchanges_0.jsonl in island_0 or another island"),
        ({}, [("enter", 0, 30, 30)], "island 0 began with the checkpoint of iteration 30, of another run"),
        ({"p_sync": 0.5}, [("enter", 0, 0, 0, {"--p-sync": "0.2"})], "--p-sync 0.5: the run in .* had 0.2"),
        (
            {},
            [("enter", 0, 0, 0, {"--tensor-model-parallel-size": "2"})],
            "had --tensor-model-parallel-size 2; only data-parallel ranks can be made again",
        ),
        (
            {},
            [("enter", 0, 0, 0), ("exchange", 0, 0, [0, 1])],
            "pieces of island 1 arrived at island 0 in exchange 0, but are not in island_1/_exchanges_0.jsonl",
        ),
        (
            {},
            [("enter", 0, 0, 0), ("event", 0, 5, "copied", {"source": 1, "made": 10, "weights": "w"})],
            "island 0 had copied at 5 what island 1 had at 10",
        ),
        (
            {},
            [("enter", 0, 0, 0), ("event", 0, 50, "copied", {"source": 1, "made": 40, "weights": "w"})],
            "has no state of island 1 after 40 iterations, which is needed later",
        ),
        ({}, [("write", 0, {"t": 3, "event": "leaves"})], "line 1: is no line of an exchange or event"),
        ({}, [("enter", 0, 0, 0), ("write", 0, {"t": 3, "exchange": 1})], "line 2: is no line of an exchange or event"),
        ({}, [("enter", 0, 0, 0), ("write", 0, [3])], "line 2: is no line of an exchange or event"),
    ],
)
def test_what_cannot_be_made_again_is_refused(logs, flags, lines, why):
    for method, *arguments in lines:
        words = arguments.pop() if method != "write" and isinstance(arguments[-1], dict) else {}
        getattr(logs, method)(*arguments, **words)
    with pytest.raises(UsageError, match="--island-schedule|--p-sync") as error:
        logs.read(**flags)
    assert re.search(why, str(error.value)), error.value
