"""Tests get the markers of the processes that they start, and say what they show; files have rooms."""

import functools
import importlib
import multiprocessing
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_lossy.base import device
from scripts.verified import LONGEST, feature_table, machine_table
from tests import programs, test_hooks
from tests.features import DEVICES, Feature, Record, cases, cases_of, features, machines
from tests.ranks import RankFailed, run_ranks
from tests.rooms import ROOMS, TESTS, check_room, room_of
from tests.slowest import slowest
from tests.tiers import long_files_first, markers

pytestmark = pytest.mark.shows(
    "tests have the markers of what they start",
    "every test says what it shows",
    device=False,
)

# --- what tests start ------------------------------------------------------------------------------------------------


def _on_ranks(size):
    return run_ranks(print, size)


def _through_a_helper():
    return [_on_ranks(size) for size in (2, 3)]


def _through_a_module():
    return programs.run_program("megatron_lossy.train")


def _in_a_function():
    def run():
        return subprocess.run(["true"])

    return run


def _over_a_closure(run):
    def test():
        run()

    return test


def _imported():
    from tests.trainer import run_module

    return run_module("megatron_lossy.train")


@given(st.integers(2, 3))
def _drawn(size):
    _on_ranks(size)


_CLOSED_OVER = _over_a_closure(_on_ranks)
_PARTIAL = functools.partial(_on_ranks, 2)
_OF_ANOTHER_FILE = test_hooks.contract_holds


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_on_ranks", {"ranks"}),
        ("_through_a_helper", {"ranks"}),
        ("_through_a_module", {"programs"}),
        ("_in_a_function", {"programs"}),
        ("_CLOSED_OVER", {"ranks"}),
        ("_imported", {"programs"}),
        ("_drawn", {"ranks"}),
        ("_PARTIAL", {"ranks"}),
        ("_OF_ANOTHER_FILE", {"ranks"}),
        ("room_of", set()),
    ],
)
def test_markers_are_those_of_what_is_named(name, expected):
    assert markers(globals()[name]) == expected  # as a parameter the function would mark this test


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


def test_files_that_take_long_come_first():
    """Each by the marker that takes longest; tests of a file stay in order."""
    tests = {
        "a": [()] * 9,
        "b": [("ranks",), ()],
        "c": [("ranks", "slow")],
        "d": [()] * 3,
        "e": [("shows", "programs")],
    }
    items = [
        SimpleNamespace(
            path=Path(file), number=k, iter_markers=lambda own=own: [SimpleNamespace(name=one) for one in own]
        )
        for file, all_own in tests.items()
        for k, own in enumerate(all_own)
    ]
    long_files_first(items)
    assert list(dict.fromkeys(str(item.path) for item in items)) == ["c", "e", "a", "b", "d"]
    for file in tests:
        numbers = [item.number for item in items if str(item.path) == file]
        assert numbers == sorted(numbers)


def test_the_slowest_files_are_named(tmp_path):
    cases = '<testcase classname="tests.test_a" time="{}"/><testcase classname="tests.test_b" time="2.5"/>'
    for k in range(2):
        (tmp_path / f"{k}.xml").write_text(f"<testsuites><testsuite>{cases.format(k)}</testsuite></testsuites>")
    (tmp_path / "killed.xml").touch()
    assert slowest(tmp_path) == ["5 s  tests/test_b.py, 2 tests", "1 s  tests/test_a.py, 2 tests"]
    assert slowest(tmp_path, 1) == ["5 s  tests/test_b.py, 2 tests"]


# --- what tests show -------------------------------------------------------------------------------------------------


EXAMPLE = """
pytestmark = [pytest.mark.slurm, pytest.mark.shows("one", "another"), pytest.mark.shows("a file", device=False)]
apart = pytest.mark.shows("apart")

@needs_lab
@apart
def test_apart(): ...

@pytest.mark.cuda
@pytest.mark.parametrize("size", [1, 2])
def test_as_the_file(): ...
"""


def test_every_test_shows_something():
    assert {case.file for case in cases()} == {*TESTS.rglob("test_*.py")}
    assert not [(case.file.name, case.name) for case in cases() if not case.shows]


def test_a_test_on_an_accelerator_says_itself_what_it_shows():
    """Else one of them would give a tick to all that its file shows."""
    assert not [(case.file.name, case.name) for case in cases() if case.markers & {*DEVICES} and not case.own]


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
            assert any(machine["device"] in case.markers for case in features()[name].cases), name


def test_markers_are_read_without_running_anything():
    first, second = cases_of(Path("test_x.py"), EXAMPLE)
    assert first.shows == (("apart", True),) and first.own and first.needs == {"root", "Slurm"}
    assert second.shows == (("one", True), ("another", True), ("a file", False)) and not second.own
    assert not Feature("one", (second,)).on_cpu and Feature("one", (second,)).needs == ["Slurm"]
    assert Feature("one", (first, second)).on_cpu and not Feature("a file", (second,)).device


def _ran(record, names, outcome, *markers):
    """``record`` hears of a test that shows ``names``."""
    marks = {mark: getattr(pytest.mark, mark).mark for mark in markers}
    item = SimpleNamespace(own_markers=[pytest.mark.shows(*names).mark], get_closest_marker=marks.get)
    report = SimpleNamespace(failed=outcome == "failed", passed=outcome == "passed")
    hook = record.pytest_runtest_makereport(item, SimpleNamespace(when="call"))
    next(hook)
    with pytest.raises(StopIteration):
        hook.send(report)


def test_a_run_on_an_accelerator_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cuda")
    file = tmp_path / "machines.yaml"
    record = Record("one card", file)
    _ran(record, ["nothing"], "skipped", "cuda")
    _ran(record, ["of a host"], "passed")
    record.pytest_sessionfinish()
    assert not file.exists()
    _ran(record, ["a", "b"], "passed", "cuda")
    _ran(record, ["b"], "failed", "cuda")
    record.pytest_sessionfinish()
    [entry] = yaml.safe_load(file.read_text())
    assert (entry["device"], entry["machine"], entry["features"]) == ("cuda", "one card", ["a"])
    assert "torch 2." in entry["versions"] and isinstance(entry["date"], str)


def test_without_an_accelerator_nothing_is_recorded(monkeypatch):
    monkeypatch.setattr(device, "device_type", lambda: "cpu")
    with pytest.raises(pytest.UsageError, match="--record one card: this machine has no accelerator"):
        Record("one card")
