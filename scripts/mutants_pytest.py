"""pytest plugin of ``scripts/mutants.py``: which test runs which line, and the chosen tests alone, in the chosen order."""

from __future__ import annotations

import json
from pathlib import Path

import coverage
import pytest


def pytest_addoption(parser):
    parser.addoption("--mutants-lines", metavar="FILE", help="write which test ran which lines, and for how long")
    parser.addoption("--mutants-tests", metavar="FILE", help="run only the tests that FILE lists, in its order")


def pytest_configure(config):
    if config.getoption("--mutants-lines"):
        config.pluginmanager.register(Lines(Path(config.getoption("--mutants-lines"))))


def pytest_collection_modifyitems(config, items):
    if not config.getoption("--mutants-tests"):
        return
    place = {
        name: number for number, name in enumerate(json.loads(Path(config.getoption("--mutants-tests")).read_text()))
    }
    items[:] = sorted((item for item in items if item.nodeid in place), key=lambda item: place[item.nodeid])


class Lines:
    """The lines of the package that each test runs, in this process and in those that it starts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.root = Path.cwd()
        self.tests: dict[str, dict[str, object]] = {}

    def _add(self, test: str, data: coverage.CoverageData) -> None:
        lines = self.tests[test]["lines"]
        for name in data.measured_files():
            if run := data.lines(name):
                file = str(Path(name).relative_to(self.root))
                lines[file] = sorted({*lines.get(file, ()), *run})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.tests[item.nodeid] = {"seconds": 0.0, "lines": {}, "passed": True}
        coverage.Coverage.current().switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            coverage.Coverage.current().switch_context("")
            self._of_other_processes(item.nodeid)

    def _of_other_processes(self, test: str) -> None:
        main = Path(coverage.Coverage.current().get_data().data_filename())
        for path in main.parent.glob(".coverage.*"):
            if path == main or path.name.endswith("-journal"):
                continue
            data = coverage.CoverageData(str(path))
            try:
                data.read()
                self._add(test, data)
            except coverage.exceptions.DataError:  # of a process that was killed, or has not finished
                continue
            finally:
                data.close()
            path.unlink()

    def pytest_runtest_logreport(self, report):
        test = self.tests[report.nodeid]
        test["seconds"] += report.duration
        test["passed"] &= not report.failed

    def pytest_sessionfinish(self):
        data = coverage.Coverage.current().get_data()
        for test in self.tests:
            data.set_query_context(test)
            self._add(test, data)
        self.path.write_text(json.dumps(self.tests))
