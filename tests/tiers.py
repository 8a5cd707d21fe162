"""The tier of a test, read from its code: what starts ranks or programs is marked so, and nobody has to remember it.

``make check`` runs what starts no process, ``make test`` what starts ranks as well, ``make test-all`` programs too, and
``make test-nightly`` long combinations. A test gets its marker here if it, one of its fixtures or a helper of theirs in
``tests`` names a function of :data:`STARTERS`. Where the package itself starts processes, the test says so:
``@pytest.mark.programs``. A guard holds tests to their markers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import multiprocessing.process
import subprocess
import sys
import types
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lossy.base.native import compiler
from tests.impostor.build import compilers

#: Functions that start processes, by module and name, and the markers of tests that call them. A lab emulates links in real
#: time, and so takes the whole machine (``needs_lab`` of tests/test_lab.py says so as well).
STARTERS = {
    ("tests.ranks", "run_ranks"): {"ranks"},
    ("tests.ranks", "Pool"): {"ranks"},  # for the tests of a file
    ("tests.rows", "Rows"): {"ranks"},  # one for all tests
    ("tests.impostor.build", "library"): {"ranks"},  # it compiles once per machine
    ("tests.programs", "Program"): {"programs"},
    ("tests.in_lab", "run_in_lab"): {"programs", "alone"},
    ("benchmarks.lab", "Lab"): {"programs", "alone"},
    ("benchmarks.lab.__main__", "main"): {"programs", "alone"},
}
#: Modules whose use in a test means a process.
MODULES = {subprocess: "programs"}
MARKERS = ("ranks", "programs")

#: About how long a test with a marker takes, where one with none takes 1.
LENGTHS = {"ranks": 5, "programs": 20, "slow": 50, "nightly": 100}


def long_files_first(items: list[pytest.Item]) -> None:
    """Sort tests by the length of their files, longest first: while the last file runs, other workers have nothing left."""
    lengths: Counter[Path] = Counter()
    for item in items:
        lengths[item.path] += max((LENGTHS.get(marker.name, 1) for marker in item.iter_markers()), default=1)
    items.sort(key=lambda item: -lengths[item.path])


def few_at_once(few: Collection[str], names: Iterable[str]) -> list[Any]:
    """Return parameters of a test: ``few`` of ``names`` are tried each time, the others when there is time."""
    return [pytest.param(name, marks=() if name in few else pytest.mark.slow) for name in names]


#: Events that Python audits before a process starts. A fork alone counts as a rank.
EVENTS = frozenset({"os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"})


def _code(function: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function, and that of the functions in it."""
    waiting = [function.__code__]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]


def _named(function: types.FunctionType) -> Iterator[Any]:
    """Return the objects that a function names: globals, members of test modules, imports and closures."""
    for code in _code(function):
        held = [function.__globals__]
        for name in code.co_names:
            if name.startswith("tests."):  # imported in the function
                with contextlib.suppress(ImportError):
                    held.append(vars(importlib.import_module(name)))
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and value.__name__.startswith("tests."):
                held.append(vars(value))
        yield from (names[name] for name in code.co_names for names in held if name in names)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # nothing in it yet
            continue


@functools.cache
def markers(thing: Any) -> frozenset[str]:
    """Return the markers that a function of ``tests`` asks for, by what it names and what that names in turn."""
    found: set[str] = set()
    seen: set[int] = set()
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, types.ModuleType):
            found |= {MODULES[one]} if one in MODULES else set()
            continue
        if isinstance(one, functools.partial):
            one = one.func
        if hasattr(one, "hypothesis"):
            waiting.append(one.hypothesis.inner_test)
        one = inspect.unwrap(one) if callable(one) else one
        starts = STARTERS.get((getattr(one, "__module__", ""), getattr(one, "__qualname__", "")))
        if starts is not None:
            found |= starts
        elif not str(getattr(one, "__module__", "")).startswith("tests."):
            continue
        elif isinstance(one, types.FunctionType):
            waiting += _named(one)
        elif isinstance(one, type):
            waiting += [value for value in vars(one).values() if isinstance(value, types.FunctionType)]
    return frozenset(found)


def markers_of(item: pytest.Function) -> set[str]:
    """Return the markers that the code of a test, its fixtures and its parameters ask for."""
    things = [item.function]
    things += [fixtures[-1].func for fixtures in item._fixtureinfo.name2fixturedefs.values()]
    if hasattr(item, "callspec"):
        things += [value for value in item.callspec.params.values() if isinstance(value, types.FunctionType)]
    return set().union(*map(markers, things))


class Guard:
    """Fails a test that starts a process without the marker for it. ``idle``: lists tests with a marker that start none."""

    def __init__(self, idle: bool) -> None:
        self._item: pytest.Item | None = None
        self._started = False
        # Of the UDP engine, of the pretended device and of Python's platform module, each once.
        self._harmless = (compiler(), *compilers(), "uname")
        self._idle: list[str] | None = [] if idle else None
        start = multiprocessing.process.BaseProcess.start

        @functools.wraps(start)
        def guarded(process):
            self._starts(MARKERS, "a process")
            start(process)

        multiprocessing.process.BaseProcess.start = guarded  # type: ignore[method-assign]
        sys.addaudithook(self._heard)

    def _heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        harmless = event == "subprocess.Popen" and arguments[0] in self._harmless
        if event in EVENTS and not harmless:
            what = arguments[1] if event == "subprocess.Popen" else event
            self._starts(MARKERS if event == "os.fork" else ("programs",), f"a program ({what})"[:200])

    def _starts(self, allowed: tuple[str, ...], what: str) -> None:
        if self._item is None:
            return
        self._started = True
        if not any(self._item.get_closest_marker(name) for name in allowed):
            names = " or ".join(f"@pytest.mark.{name}" for name in allowed)
            pytest.fail(f"starts {what}: needs {names} (tests/tiers.py)")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Function) -> Iterator[None]:
        """Watch ``item``, and the fixtures that start with it."""
        self._item, self._started = item, False
        try:
            return (yield)
        finally:
            self._item = None
            # One whose fixture does may come after another that had it started.
            if self._idle is not None and not self._started and markers(item.function):
                self._idle.append(item.nodeid)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Say which tests were idle."""
        for name in self._idle or ():
            terminalreporter.write_line(f"starts no process: {name}")
