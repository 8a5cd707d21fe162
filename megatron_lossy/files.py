"""Writing whole files and folders: aside, synced to disk, then renamed.

A reader finds the old content, the new content, or nothing; also after a kill or a power cut. What lies aside has a
hidden name that ends in ``.tmp``, so that no reader takes it for what it becomes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, over what is there. Once this returns, it is on disk."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file and give it the name ``path``, over what is there. Once this returns, it is on disk.

    ``write`` takes the path to write to, which has another suffix than ``path``. If it raises, nothing is left of
    what it wrote. The file has the permissions that ``open(path, "w")`` would leave it with.
    """
    path = Path(path)
    aside = aside_of(path)
    try:
        write(aside)
        with contextlib.suppress(OSError):  # no file there, or a file system without permissions
            shutil.copymode(path, aside)
        publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def aside_of(path: str | os.PathLike[str]) -> Path:
    """A hidden path in the folder of ``path``, of which no other caller knows. Nothing is made there."""
    path = Path(path)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def publish(aside: Path, path: str | os.PathLike[str]) -> None:
    """Sync the file or folder ``aside``, rename it to ``path``, and sync the rename.

    Replaces a file. Raises :class:`OSError`, with ``aside`` as it was, where ``path`` is a folder that is not empty.
    """
    path = Path(path)
    for inner in [*aside.rglob("*"), aside] if aside.is_dir() else [aside]:
        _sync(inner)
    os.replace(aside, path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems of networks cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(handle)
