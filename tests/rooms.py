"""The room of a test file.

``pytest --room=recovery`` runs the tests of one room or mechanism of ``megatron_lossy``, at its top or in a folder of rooms: of files in ``tests/recovery``, and of files
that :data:`ROOMS` gives to it. A file that nobody gave to a room is a room by itself.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "megatron_lossy"

#: Folders that hold rooms.
HOLDERS = ("base", "config", "run", "mechanisms", "lab")
#: How names of files begin, where not with the name of their room. The longest that fits holds.
ROOMS = {
    "averaging": "islands",
    "compensated": "lead",
    "corruption": "channel",
    "fct": "benchmarks",
    "exporter": "run",
    "plan": "lab",
    "patches_folder": "plugin",
    "pieces": "transport",
    "pipeline": "boundaries",
    "saved_state": "run",
    "stream": "transport",
    "streams": "transport",
    "study": "lab",
    "sync": "replicas",
    "synchroniser": "replicas",
    "torchrun_report": "train",
    "udp": "transport",
    "waits": "transport",
}


def room_of(path: Path) -> str:
    """Return the room of a test file: its folder, or what its name begins with."""
    if path.parent != TESTS:
        return path.relative_to(TESTS).parts[0]
    folders = (PACKAGE, *(PACKAGE / name for name in HOLDERS))
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
