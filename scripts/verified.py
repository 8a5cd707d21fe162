"""The tables of docs/verified.md: what tests show on which device, and on which machines they ran."""

from __future__ import annotations

import os
from pathlib import Path

from tests.features import DEVICES, TESTS, Feature, features, machines
from tests.rooms import HOLDERS, PACKAGE

PAGE = TESTS.parent / "docs" / "verified.md"
#: How many characters a row may have, so that one reads it as a line.
LONGEST = 160


def _place(room: str) -> tuple[int, str]:
    """Return the part of the table in which a room stands, and its name."""
    if (PACKAGE / "mechanisms" / room).is_dir():
        return 1, room
    holders = [PACKAGE, *(PACKAGE / holder for holder in HOLDERS)]
    known = any((holder / name).exists() for holder in holders for name in (room, f"{room}.py"))
    return (0, room) if known else (2, "the repository")


def _labels() -> dict[Path, str]:
    """Return the file's name in the table: without its folder, unless another folder has that name too."""
    files = sorted(TESTS.rglob("test_*.py"))
    names = [file.stem.removeprefix("test_") for file in files]
    return {file: name if names.count(name) == 1 else f"{file.parent.name}/{name}" for file, name in zip(files, names)}


def _tick(feature: Feature, device: str) -> str:
    if not feature.device:
        return "-"
    ran = any(feature.name in machine.get("features", ()) for machine in machines() if machine["device"] == device)
    return "✓" if ran else "not run"


def feature_table() -> str:
    """Return a row for each feature, by room: the core, the mechanisms, all else."""
    labels = _labels()
    rows, place = ["| feature | CPU | pretended | CUDA | HPU | needs | tests |", f"|{' --- |' * 7}"], None
    for feature in sorted(features().values(), key=lambda feature: (*_place(feature.room), feature.files[0])):
        if _place(feature.room) != place:
            place = _place(feature.room)
            rows.append(f"| **{place[1]}** | | | | | | |")
        cells = [feature.name, "✓" if feature.on_cpu else "-", "✓" if feature.on_pretended else "-"]
        cells += [*(_tick(feature, device) for device in DEVICES)]
        cells += [", ".join(feature.needs), " ".join(f"[{labels[file]}]" for file in feature.files)]
        rows.append(f"| {' | '.join(cells)} |")
    shown = sorted({file for feature in features().values() for file in feature.files})
    links = [f"[{labels[file]}]: {Path(os.path.relpath(file, PAGE.parent)).as_posix()}" for file in shown]
    return "\n".join([*rows, "", *links]) + "\n"


def machine_table() -> str:
    """Return a row for each machine on which tests ran, and one for each device without a run."""
    rows = ["| device | machine | versions | date |", "| --- | --- | --- | --- |"]
    rows += [
        f"| {machine['device'].upper()} | {machine['machine']} | {machine['versions']} | {machine['date']} |"
        for machine in machines()
    ]
    ran = {machine["device"] for machine in machines()}
    rows += [f"| {device.upper()} | nobody has run it | | |" for device in DEVICES if device not in ran]
    return "\n".join(rows) + "\n"
