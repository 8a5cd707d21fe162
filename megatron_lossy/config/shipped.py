"""The files that come with the package besides its code: configurations, the launchers' scripts, patches.

In a checkout they are folders at its top, in an installed wheel they are below ``megatron_lossy/config/shipped_files``.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

from ..base.errors import refuse
from ..base.files import aside_of, sync, writing

FOLDERS = ("configs", "launch", "patches")


def shipped_folder(name: str) -> Path:
    """Return the place of the folder ``name`` of :data:`FOLDERS`."""
    installed = Path(__file__).with_name("shipped_files") / name
    return installed if installed.is_dir() else Path(__file__).parents[2] / name


def find_config(file: str | Path) -> Path:
    """Return the configuration ``file``: itself if it is there, else the shipped one of that name.

    ``configs/tiny/llama_1m.yaml`` and ``tiny/llama_1m`` both name the same shipped file.
    """
    path = Path(file)
    if path.exists() or path.is_absolute():
        return path
    name = Path(*path.parts[1:]) if path.parts[:1] == ("configs",) else path
    if not name.name:  # configs alone
        return path
    for candidate in (name, name.with_name(f"{name.name}.yaml")):
        if (found := shipped_folder("configs") / candidate).is_file():
            return found
    return path


def copy_shipped(folder: str | Path) -> list[Path]:
    """Copy :data:`FOLDERS` into ``folder``. If that fails, nothing is left there.

    Raise :class:`UsageError` for folders that are there already, and the errors of
    :func:`megatron_lossy.base.files.writing`.
    """
    folder = Path(folder)
    targets = [folder / name for name in FOLDERS]
    for target in targets:
        if target.exists():
            raise refuse("FOLDER", folder, f"{target.name} is there already")
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    aside = aside_of(folder / "copy")
    with writing("FOLDER", folder):
        try:
            aside.mkdir(parents=True)
            for name in FOLDERS:
                _copy(shipped_folder(name), aside / name)
            sync(aside)
            for target in targets:
                (aside / target.name).rename(target)
            aside.rmdir()
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            with contextlib.suppress(OSError):
                for path in new:
                    path.rmdir()
            raise
    return targets


def _copy(folder: Path, target: Path) -> None:
    """Copy as :func:`shutil.copytree` does, but raise each error: that function turns them into a text."""
    target.mkdir()
    for path in folder.iterdir():
        if path.is_dir():
            _copy(path, target / path.name)
        else:
            shutil.copy2(path, target / path.name)
