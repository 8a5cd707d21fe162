"""The checkpoints in a folder, by Megatron's names."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import cannot, refuse

#: The file that names the latest checkpoint of a folder.
TRACKER = "latest_checkpointed_iteration.txt"


def iteration_folder(folder: str | os.PathLike[str], iteration: int) -> Path:
    """Return the folder in which Megatron puts the checkpoint of ``iteration``."""
    return Path(folder) / f"iter_{iteration:07d}"


def iterations_in(folder: str | os.PathLike[str]) -> list[int]:
    """Return the iterations of all finished checkpoints in ``folder``, the earliest first."""
    names = (path.name.removeprefix("iter_") for path in Path(folder).glob("iter_*"))
    return sorted(int(name) for name in names if name.isdecimal())


def names_checkpoint(folder: str | os.PathLike[str]) -> bool:
    """Return whether ``folder`` names a latest checkpoint."""
    return os.path.isfile(os.path.join(folder, TRACKER))


def latest_iteration(folder: str | os.PathLike[str]) -> int | None:
    """Return the iteration of the latest whole checkpoint in ``folder``, if any. Raise :class:`UsageError`."""
    if not names_checkpoint(folder):
        return None
    tracker = Path(folder) / TRACKER
    try:
        text = tracker.read_text(errors="replace").strip()
    except OSError as error:
        raise cannot("--load", tracker, "read", error) from None
    if not text.isdigit() or not iteration_folder(folder, int(text)).is_dir():
        raise refuse("--load", folder, f"{TRACKER} there names {text!r}, which is no checkpoint of that folder")
    return int(text)
