"""Claims of the tests, read from their markers without running them, and those that passed on an accelerator.

A file says what all of its tests show:

    pytestmark = pytest.mark.shows("rates, bursts and schedules", device=False)

A test that shows something else says so itself. ``device=False``: no tensor of an accelerator takes part. The pages have
a row for each feature (``scripts/verified.py``). A test with the marker ``cuda`` or ``hpu`` says by itself what it shows;
``pytest --record MACHINE`` adds what passed to ``machines.yaml``.
"""

from __future__ import annotations

import ast
import datetime
import functools
import importlib.metadata
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lossy.base import device
from tests.rooms import TESTS, room_of

MACHINES = TESTS / "machines.yaml"
DEVICES = ("cuda", "hpu")
#: Tests on a device that only pretends.
PRETENDED = TESTS / "impostor"
#: Requirements that not every machine meets, by the decorator of a test.
NEEDS = {"megatron_lm": "Megatron-LM", "slurm": "Slurm", "needs_lab": "root"}


@dataclass(frozen=True)
class Case:
    """A test and its markers. ``shows``: (feature, whether an accelerator could take part); ``own``: that itself says so."""

    file: Path
    name: str
    shows: tuple[tuple[str, bool], ...]
    own: bool
    markers: frozenset[str]

    def runs_on(self, device: str) -> bool:
        """Return whether it, or a twin of it, has the marker of this accelerator."""
        return bool({device, f"on_{device}"} & self.markers)

    @property
    def needs(self) -> frozenset[str]:
        """A requirement that not every machine meets."""
        return frozenset(NEEDS[one] for one in self.markers & NEEDS.keys())


@dataclass(frozen=True)
class Feature:
    """A feature and the tests that show it."""

    name: str
    cases: tuple[Case, ...]

    @property
    def room(self) -> str:
        """The room of the first file."""
        return room_of(self.files[0])

    @property
    def files(self) -> list[Path]:
        """The files of its tests, those of the pretended device last."""
        return sorted({case.file for case in self.cases}, key=lambda file: (file.parent == PRETENDED, file))

    @property
    def device(self) -> bool:
        """Whether an accelerator could take part."""
        return any((self.name, True) in case.shows for case in self.cases)

    @property
    def on_pretended(self) -> bool:
        """Whether one of its tests runs on the pretended CUDA device (docs/impostor.md)."""
        return any((self.name, True) in case.shows for case in self.cases if case.file.parent == PRETENDED)

    @property
    def on_cpu(self) -> bool:
        """Whether one of its tests needs no accelerator."""
        return any(not case.markers & {*DEVICES} for case in self.cases)

    @property
    def needs(self) -> list[str]:
        """Return the needs of each of its tests."""
        return sorted(frozenset.intersection(*(case.needs for case in self.cases)))


def _marks(node: ast.expr, assigned: dict[str, ast.expr]) -> Iterator[tuple[str, ast.Call | None]]:
    """Yield the markers of a decorator or a ``pytestmark``: their names, and the calls that made them."""
    if isinstance(node, ast.List | ast.Tuple):
        for one in node.elts:
            yield from _marks(one, assigned)
    elif isinstance(node, ast.Name):
        yield node.id, None
        if node.id in assigned:
            yield from _marks(assigned[node.id], assigned)
    else:
        function = node.func if isinstance(node, ast.Call) else node
        if isinstance(function, ast.Attribute):
            yield function.attr, node if isinstance(node, ast.Call) else None


def _shown(marks: list[tuple[str, ast.Call | None]]) -> tuple[tuple[str, bool], ...]:
    """Return the features of markers, in their order."""
    found: list[tuple[str, bool]] = []
    for call in (call for name, call in marks if name == "shows" and call is not None):
        taking_part = {word.arg: ast.literal_eval(word.value) for word in call.keywords}.get("device", True)
        found += [(ast.literal_eval(word), taking_part) for word in call.args]
    return tuple(found)


def cases_of(file: Path, text: str) -> list[Case]:
    """Return the tests of a file with ``text``."""
    tree = ast.parse(text)
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    of_file = list(_marks(assigned["pytestmark"], assigned)) if "pytestmark" in assigned else []
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            marks = [mark for one in node.decorator_list for mark in _marks(one, assigned)]
            names = frozenset(name for name, _ in [*of_file, *marks])
            own = _shown(marks)
            found.append(Case(file, node.name, own or _shown(of_file), bool(own), names))
    return found


@functools.cache
def cases() -> list[Case]:
    """Return all tests."""
    return [
        case for file in sorted(TESTS.rglob("test_*.py")) for case in cases_of(file, file.read_text(encoding="utf-8"))
    ]


@functools.cache
def features() -> dict[str, Feature]:
    """Return all features by name, in the order of the files."""
    names = dict.fromkeys(name for case in cases() for name, _ in case.shows)
    return {name: Feature(name, tuple(case for case in cases() if name in dict(case.shows))) for name in names}


def machines() -> list[dict[str, Any]]:
    """Return a place of tests: device, machine, versions, date, and of an accelerator the shown features."""
    return yaml.safe_load(MACHINES.read_text(encoding="utf-8"))


class Record:
    """Adds to a file what tests showed on the accelerator of this machine."""

    def __init__(self, machine: str, file: Path = MACHINES) -> None:
        self._kind = device.device_type()
        if self._kind not in DEVICES:
            raise pytest.UsageError(
                f"--record {machine}: this machine has no accelerator of kind {' or '.join(DEVICES)}"
            )
        self._machine = machine
        self._file = file
        self._passed: set[str] = set()
        self._failed: set[str] = set()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Note what a test with the marker of the accelerator shows."""
        report = yield
        if item.get_closest_marker(self._kind):
            shown = {name for mark in item.own_markers if mark.name == "shows" for name in mark.args}
            if report.failed:
                self._failed |= shown
            elif report.passed and call.when == "call":
                self._passed |= shown
        return report

    def pytest_sessionfinish(self) -> None:
        """Write, if there is anything to write."""
        shown = sorted(self._passed - self._failed)
        if not shown:
            return
        of_packages = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "megatron-core")]
        entry = {
            "device": self._kind,
            "machine": self._machine,
            "versions": ", ".join([f"Python {platform.python_version()}", *of_packages]),
            "date": f"{datetime.date.today():%Y-%m-%d}",
            "features": shown,
        }
        comment, _, known = self._file.read_text(encoding="utf-8").partition("\n")
        entries = yaml.safe_load(known)
        if {**entries[-1], "features": shown} == entry:  # of another run of pytest there
            entry["features"] = sorted({*shown, *entries.pop()["features"]})
        text = yaml.safe_dump([*entries, entry], sort_keys=False, allow_unicode=True, width=120)
        self._file.write_text(f"{comment}\n{text}", encoding="utf-8")
