"""Tests get the markers of the processes that they start, and say what they show; files have rooms."""

import importlib
import multiprocessing
import os

import pytest

from scripts.verified import LONGEST, feature_table, machine_table
from tests.features import DEVICES, cases, features, machines
from tests.ranks import RankFailed
from tests.rooms import ROOMS, TESTS, check_room, room_of

pytestmark = pytest.mark.shows(
    "tests have the markers of what they start", "every test says what it shows", device=False
)


@pytest.mark.parametrize(
    ("start", "marker"),
    [
        (lambda: os.system("true"), "programs"),
        (lambda: os.posix_spawn("/bin/true", ["true"], {}), "programs"),
        (lambda: importlib.import_module("subprocess").run(["true"]), "programs"),
        (lambda: multiprocessing.get_context("fork").Process(target=os.getpid).start(), "ranks"),
    ],
)
def test_what_starts_a_process_without_a_marker_fails(start, marker):
    with pytest.raises(pytest.fail.Exception, match=f"needs @pytest.mark.{marker}"):
        start()


def process(rank, fails=False):
    assert not (fails and rank)
    return os.getpid()


def test_ranks_of_a_pool_stay_until_one_fails(pool):
    first = pool.run(process, 2)
    assert pool.run(process, 2) == first and pool.run(process, 1) != first[:1]
    with pytest.raises(RankFailed, match="rank 1:(.|\n)*AssertionError"):
        pool.run(process, 2, True)
    others = pool.run(process, 2)
    assert not set(first) & set(others) and pool.run(process, 2) == others


def test_files_belong_to_rooms():
    assert room_of(TESTS / "test_recovery_feedback_ranks.py") == "recovery"
    assert room_of(TESTS / "test_udp.py") == room_of(TESTS / "test_udp_engine.py") == "transport"
    assert room_of(TESTS / "recovery" / "test_anything.py") == "recovery"
    assert room_of(TESTS / "test_of_nothing.py") == "of_nothing"
    names = [path.stem.removeprefix("test_") for path in TESTS.rglob("test_*.py")]
    assert not [one for one in ROOMS if not any(name == one or name.startswith(f"{one}_") for name in names)]
    check_room("recovery")
    with pytest.raises(pytest.UsageError, match="--room recover: must be one of .*, recovery,"):
        check_room("recover")


def test_every_test_shows_something():
    assert {case.file for case in cases()} == {*TESTS.rglob("test_*.py")}
    assert not [(case.file.name, case.name) for case in cases() if not case.shows]


def test_a_test_on_an_accelerator_says_itself_what_it_shows():
    """Else one of them would give a tick to all that its file shows."""
    assert not [(case.file.name, case.name) for case in cases() if any(map(case.runs_on, DEVICES)) and not case.own]


def test_all_tests_of_a_feature_say_alike_whether_an_accelerator_takes_part():
    of = {(name, taking_part) for case in cases() for name, taking_part in case.shows}
    assert len(of) == len(features())


def test_names_are_short_and_rows_are_lines():
    assert not [name for name in features() if len(name.split()) > 12]
    assert not [row for row in feature_table().splitlines() if len(row) > LONGEST]
    assert not [row for row in machine_table().splitlines() if len(row) > LONGEST]


def test_what_was_shown_on_an_accelerator_is_a_feature_with_a_test_for_it():
    for machine in machines():
        assert {"device", "machine", "versions", "date"} <= machine.keys()
        for name in machine.get("features", ()):
            assert any(case.runs_on(machine["device"]) for case in features()[name].cases), name
