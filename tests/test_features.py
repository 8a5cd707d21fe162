"""Every test says what it shows, and the table of docs/verified.md has a readable line for it."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from megatron_lossy import device
from scripts.verified import LONGEST, feature_table, machine_table
from tests.features import DEVICES, TESTS, Feature, Record, cases, cases_of, features, machines

pytestmark = pytest.mark.shows("every test says what it shows", device=False)

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
