"""The diary of an island that is a launch of its own: its lines, its metrics, and the lines of an earlier start."""

from __future__ import annotations

import json

import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.flags import identity, of_flags
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.monitor import Diary
from megatron_lossy.mechanisms.islands.rounds import Epoch, Member

pytestmark = pytest.mark.shows("islands that are launches of their own: the log of epochs")

BOTH = Epoch((Member(0, 5, "send"), Member(2, 7, "listen")), 3)


def lines(folder):
    return [json.loads(line) for line in (folder / "_epochs.jsonl").read_text().splitlines()]


def test_a_line_for_each_epoch_and_each_event(tmp_path):
    diary = Diary(2, str(tmp_path))
    diary.note("enters", at=0, run=3)
    for exchange in range(3, 8):
        if exchange == 5:
            diary.note("lost contact", seconds=0.5)
            diary.ended(4, 2, 0.0)
            diary.ended(4, 2, 0.0)  # of another shard
        diary.begin(exchange, exchange + 1, BOTH if exchange < 5 else None, lag=exchange - 3)
    diary.ended(6, 3, 2.5)
    diary.ended(7, 1, 0.0)
    assert diary.lost == 1 - 2.5 / 8
    diary.finish()
    first, lost, last = lines(tmp_path)
    assert first == {
        "exchange": 3, "id": BOTH.id, "t": 4, "island": 2, "members": [[0, 5], [2, 7]], "roles": ["send", "listen"],
        "lag": 0, "events": [{"event": "enters", "at": 0, "run": 3}], "lost": [],
    }  # fmt: skip
    assert (lost["exchange"], lost["id"], lost["members"], lost["lost"]) == (5, None, [], [4])
    assert lost["events"] == [{"event": "lost contact", "seconds": 0.5}]
    assert (last["events"], last["lost"]) == ([{"event": "leaves"}], [7])
    assert diary.metrics() == {"island members": 4 / 5, "island senders": 2 / 5, "exchanges lost": 2 / 5}
    assert diary.metrics() == {}


def test_a_later_start_keeps_all_whole_lines_of_its_own_run_alone(tmp_path):
    before = Diary(0, str(tmp_path))
    before.begin(3, 4, BOTH, 0)
    with open(tmp_path / "_epochs.jsonl", "a") as file:
        file.write('{"exchange": 9, "id')  # killed
    with pytest.raises(UsageError, match="holds the log of a run"):
        Diary(0, str(tmp_path)).check()
    again = Diary(0, str(tmp_path))
    again.restart(2)  # of a checkpoint: others have gone on
    again.check()
    again.begin(6, 7, None, 3)
    assert [one["exchange"] for one in lines(tmp_path)] == [3, 6]


def test_a_folder_of_such_a_run_can_be_read():
    """Its flags are kept without --rendezvous, which may change."""
    flags = {"islands": 2, "sync_method": "parameters", "rendezvous": "etcd://host/run", "island": 1}
    kept = identity(LossyConfig(**flags, island_keep=9, island_rejoin="listen"))
    assert "rendezvous" not in kept and of_flags(LossyConfig, kept).island_keep == 9


def test_other_ranks_write_nothing():
    diary = Diary(0)
    diary.note("listens")
    diary.begin(0, 1, BOTH, 0)
    diary.finish()
    assert diary.metrics()["island members"] == 2
