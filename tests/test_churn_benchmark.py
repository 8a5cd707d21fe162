"""``make run-churn``: what happens when, who was there, updates made of those possible, and the picture."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks.churn.islands import Life
from benchmarks.churn.results import ALONE, LISTENS, SENDS, Island, Results, markdown
from benchmarks.churn.schedule import COORDINATOR, DEFAULT, Director, Kills, PastEvent, first_islands, without_cuts
from megatron_lossy.lab.virtual.island_schedule import Event, Schedule

pytestmark = pytest.mark.shows("benchmarks of steps, parameters and islands run")


class Recorded:
    """Islands that note what is done to them."""

    def __init__(self):
        self.iteration, self.done, self._lives = 0, [], {}

    def latest(self, slot):
        return self._lives[slot]

    def start(self, slot):
        self.done.append(("start", slot))
        self._lives[slot] = SimpleNamespace(slot=slot, runs=True, frozen=False, cut=False, trained=True)

    def signal(self, slot, number):
        self.done.append((number.name, slot))
        life = self._lives[slot]
        life.runs, life.frozen = number.name != "SIGKILL", number.name == "SIGSTOP"

    def running(self):
        return [life for life in self._lives.values() if life.runs]

    @property
    def lives(self):
        return list(self._lives.values())

    def cut(self, slot, there):
        self.done.append(("join" if there else "cut", slot))
        self._lives[slot].cut = not there

    def serve(self):
        self.done.append(("serve", COORDINATOR))

    def stop_serving(self):
        self.done.append(("stop serving", COORDINATOR))


def test_what_happens_and_when():
    islands = Recorded()
    director = Director(islands, DEFAULT, (770, 900), tell=lambda _: None)
    for slot in first_islands(DEFAULT, 4):
        islands.start(slot)
    assert [slot for _, slot in islands.done] == [0, 1, 2]
    islands.done.clear()
    for islands.iteration in range(0, 1200, 10):
        director.direct()
    assert islands.done == [
        ("SIGKILL", 1),
        ("start", 1),
        ("start", 3),
        ("SIGSTOP", 2),
        ("SIGCONT", 2),
        ("cut", 0),
        ("join", 0),
        ("stop serving", COORDINATOR),
        ("SIGKILL", 3),
        ("serve", COORDINATOR),
        ("start", 3),
    ]
    assert [one.at for one in director.happened][:3] == [120, 230, 310]


def test_kills_come_to_an_end():
    """Once all train again they get SIGTERM, once."""
    islands = Recorded()
    kills = Kills(islands, 0.001, 10**9, seed=1, most=3, tell=lambda _: None)
    for slot in range(3):
        islands.start(slot)
    while len(islands.done) < 3 + 2 * 3 + 3:
        kills.direct()
    for _ in range(10):
        time.sleep(0.001)
        kills.direct()
    assert [what for what, _ in islands.done[3:9]] == ["SIGKILL", "start"] * 3
    assert islands.done[9:] == [("SIGTERM", slot) for slot in range(3)]


def test_where_nobody_can_be_cut_off():
    events = [Event(1, 0, "cut"), Event(2, 0, "return"), Event(3, 1, "cut"), Event(4, 1, "stop"), Event(5, 1, "return")]
    assert without_cuts(Schedule(events)).events == [Event(4, 1, "stop"), Event(5, 1, "return")]
    assert without_cuts(DEFAULT).events == [one for one in DEFAULT.events if one.slot]


def test_what_was_left_out_and_made_twice(results):
    frozen, killed = results.islands
    assert (frozen.left_out, killed.left_out) == (12, 0)  # between 69 and 82
    assert not killed.made_twice
    assert results.whole().startswith(
        "Iterations that an island left out while it was there, and neither frozen nor cut off: 0;"
    )


def test_many_events_are_told_by_kind(results):
    many = [one._replace(when=one.when + turn) for turn in range(20) for one in results.happened[:2]]
    rows = Results(results.islands, many + results.happened[:2], 100).events()
    assert [row[:2] for row in rows[1:]] == [["kill -9", "21"], ["there again", "21"]]


def life(slot, number, first, last, seconds=0.1, at=0.0):
    records = [{"kind": "train", "iteration": t, "lm loss": 3.0, "seconds": seconds} for t in range(first, last + 1)]
    records.append({"kind": "valid", "iteration": last, "lm loss": 2.5})
    seen = {t: at + t for t in range(first, last + 1)}
    return Life(slot, number, None, Path(), Path(), records, seen)


def line(t, members, roles, lost=()):
    return {"t": t, "members": [[slot, 1] for slot in members], "roles": roles, "lost": list(lost)}


@pytest.fixture
def results(tmp_path):
    """One of two islands is killed at 40 and starts again at 60, the other is frozen from 70 to 80."""
    both, none = ["send", "send"], []
    lines = {
        0: [line(2, [0, 1], both), line(41, [], none, [41, 42]), line(66, [0, 1], ["send", "listen"])],
        1: [line(2, [0, 1], both), line(66, [0, 1], ["send", "listen"])],
    }
    for slot, found in lines.items():
        folder = tmp_path / f"island_{slot}"
        folder.mkdir()
        (folder / "_epochs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in found))
    lives = [life(0, 1, 1, 69), life(0, 2, 82, 100, seconds=0.2), life(1, 1, 1, 40), life(1, 2, 61, 100, seconds=0.3)]
    lives[0].records[-1:] = lives.pop(1).records  # frozen, and the same process
    lives[0].seen |= {t: float(t) for t in range(82, 101)}
    happened = [
        PastEvent(40, 1, "stop", 40.5),
        PastEvent(60, 1, "return", 60.5),
        PastEvent(70, 0, "freeze", 69.5),
        PastEvent(80, 0, "return", 81.5),
    ]
    return Results([Island.read(slot, lives, tmp_path) for slot in range(2)], happened, 100)


def test_updates_pauses_and_who_was_there(results):
    frozen, killed = results.islands
    assert frozen.possible(results.happened, 100) == 90
    assert killed.possible(results.happened, 100) == 80
    assert results.goodput == pytest.approx((69 + 19 + 80) / 170)
    assert frozen.lost == 2 and (frozen.begun(1), frozen.begun(20)) == (88, 4)
    assert results.arrived == pytest.approx(1 - 2 / 168)
    assert frozen.spans == [(0, 40, SENDS), (40, 65, ALONE), (65, 69, SENDS), (81, 100, SENDS)]
    assert killed.spans == [(0, 40, SENDS), (60, 65, SENDS), (65, 100, LISTENS)]
    assert [results.longest_pause(number) for number in range(4)] == [0.1, 0.1, 0.3, 0.3]
    assert results.headline() == "98.8 % of the possible updates made; of 98.8 % of the exchanges something arrived"
    rows = results.table()
    assert rows[1][:5] == ["island 0", "1", "88", "97.8 %", "97.7 %"]
    assert rows[2][:5] == ["island 1", "2", "80", "100.0 %", "100.0 %"]
    assert markdown(results.events())[2] == "| 40 | island 1 kill -9 | 0.10 |"
    results.happened[0] = PastEvent(60, 1, "stop", 60.5)  # and started again at once, before an iteration ends
    assert results.longest_pause(0) is None
    assert markdown(results.events())[2] == "| 60 | island 1 kill -9 | - |"
    assert ["kill -9", "1", "-", "-"] in results._kinds()
