"""The files that come with the package beside its code: configurations, the launchers' scripts, patches.

In a checkout they are folders at its top, in an installed wheel they are below ``megatron_lossy/shipped``.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from .errors import refuse

FOLDERS = ("configs", "launch", "patches")


def shipped_folder(name: str) -> Path:
    """Where the folder ``name`` of :data:`FOLDERS` is."""
    package = Path(__file__).parent
    installed = package / "shipped" / name
    return installed if installed.is_dir() else package.parent / name


def find_config(file: str | Path) -> Path:
    """The configuration ``file``: itself if it is there, else the one of that name that comes with the package.

    ``configs/tiny/llama_1m.yaml`` and ``tiny/llama_1m`` both name the same one of those.
    """
    path = Path(file)
    if path.exists() or path.is_absolute():
        return path
    name = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    for candidate in (name, name.with_name(f"{name.name}.yaml")):
        if (found := shipped_folder("configs") / candidate).is_file():
            return found
    return path


def copy_shipped(folder: str | Path) -> list[Path]:
    """Copy :data:`FOLDERS` into ``folder``. Raises :class:`UsageError`, for what is there already with nothing copied."""
    targets = [Path(folder) / name for name in FOLDERS]
    for target in targets:
        if target.exists():
            raise refuse("FOLDER", folder, f"{target.name} is there already")
    try:
        for target in targets:
            shutil.copytree(shipped_folder(target.name), target)
    except OSError as error:
        raise refuse("FOLDER", folder, f"cannot be written: {error}") from None
    return targets
