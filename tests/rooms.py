"""The room of a test file, and files that two runs of pytest share.

``pytest --room=recovery`` runs the tests of one room or mechanism of ``megatron_lossy``: of files in ``tests/recovery``, and of files
that :data:`ROOMS` gives to it. A file that nobody gave to a room is a room by itself.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "megatron_lossy"

#: How names of files begin, where not with the name of their room. The longest that fits holds.
ROOMS = {
    "averaging": "islands",
    "compensated": "lead",
    "corruption": "channel",
    "error_log": "delivery_log",
    "fct": "lab",
    "link": "lab",
    "lstm_language_model": "lab",
    "param_priority": "priority",
    "patches_folder": "plugin",
    "pieces": "transport",
    "pipeline": "boundaries",
    "streams": "transport",
    "study": "lab",
    "sync": "replicas",
    "synchroniser": "replicas",
    "torchrun_report": "train",
    "udp": "transport",
    "udp_stages": "boundaries",
    "virtual_stages": "async_pipeline",
    "waits": "transport",
}


def room_of(path: Path) -> str:
    """The room of a test file: its folder, or what its name begins with."""
    if path.parent != TESTS:
        return path.relative_to(TESTS).parts[0]
    folders = (PACKAGE, PACKAGE / "mechanisms")
    rooms = {
        one.stem: one.stem for folder in folders for one in folder.iterdir() if not one.stem.startswith("_")
    } | ROOMS
    name = path.stem.removeprefix("test_")
    fitting = [one for one in rooms if name == one or name.startswith(f"{one}_")]
    return rooms[max(fitting, key=len)] if fitting else name


def check_room(room: str) -> None:
    """Refuse a room that has no test."""
    known = sorted({room_of(path) for path in TESTS.rglob("test_*.py")})
    if room not in known:
        raise pytest.UsageError(f"--room {room}: must be one of {', '.join(known)}")


def _file(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


class Shared:
    """Leaves a file of tests to the other run if that has claimed it first, by a file in ``folder``."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._ours: dict[str, bool] = {}

    def _claim(self, file: str) -> bool:
        try:
            os.close(os.open(os.path.join(self._folder, file.replace("/", ".")), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Begin with files of many tests that start ranks: while the last file runs, the other run may have nothing left."""
        times: Counter[str] = Counter()
        for item in items:
            times[_file(item)] += 10 if item.get_closest_marker("ranks") else 1
        items.sort(key=lambda item: -times[_file(item)])

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Whether there is nothing left to do for ``item``."""
        file = _file(item)
        if file not in self._ours:
            self._ours[file] = self._claim(file)
        return None if self._ours[file] else True
