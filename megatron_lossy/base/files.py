"""Writes whole files and folders: aside, synced to disk, then renamed.

A reader finds the old content, the new content, or nothing, also after a kill or a power cut. A file aside has a hidden
name that ends in ``.tmp``, so that no reader takes it for the finished file.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from .errors import cannot, machine_error, refuse

#: The least bytes of a secret: as many as an AES-128 key has.
_KEY_BYTES = 16


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` to ``path`` as UTF-8, over an older file. Once this returns, it is on disk."""
    replace_file(path, lambda aside: aside.write_text(text, encoding="utf-8"))


def replace_file(path: str | os.PathLike[str], write: Callable[[Path], object]) -> None:
    """Let ``write`` make a file and give it the name ``path``, over an older file. Once this returns, it is on disk.

    ``write`` takes the path to write to, which has another suffix than ``path``. If it raises, its files are removed,
    and an :class:`OSError` names ``path``. The file has the same permissions as after ``open(path, "w")``.
    """
    path = Path(path)
    aside = aside_of(path)
    try:
        with naming(path):
            write(aside)
            with contextlib.suppress(OSError):  # no file there, or a file system without permissions
                shutil.copymode(path, aside)
            publish(aside, path)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context in which an :class:`OSError` names ``path``, also if it happened aside or to an open file.

    Other errors with a failure of the machine as their cause become such an :class:`OSError` too: libraries that write
    files raise them.
    """
    try:
        yield
    except Exception as error:
        failed = error if isinstance(error, OSError) and error.errno is not None else machine_error(error)
        if failed is None:
            raise
        raise OSError(failed.errno, failed.strerror, os.fspath(path)) from error


@contextlib.contextmanager
def writing(flag: str, path: str | os.PathLike[str]) -> Iterator[None]:
    """Return a context in which ``path``, which ``flag`` names, is written.

    If it cannot be written, that is a :class:`UsageError`, or an :class:`OSError` if the machine is at fault.
    """
    try:
        yield
    except OSError as error:
        raise cannot(flag, path, "written", error) from None


def read_key(path: str, flag: str, advice: str = "") -> bytes:
    """Return the secret in the file ``path``, which ``flag`` names. ``advice``: against one that is too short.

    Raise :class:`UsageError` if the file cannot be read or is too short.
    """
    try:
        key = Path(path).read_bytes()
    except OSError as error:
        raise cannot(flag, path, "read", error) from None
    if len(key) < _KEY_BYTES:
        raise refuse(flag, path, f"has {len(key)} bytes, and a secret needs {_KEY_BYTES} at least{advice}")
    return key


def check_folder(flag: str, folder: str | os.PathLike[str] | None) -> None:
    """Raise :class:`UsageError` unless ``folder`` can be written to, or could be made. Makes nothing."""
    if folder is None:
        return
    asked = there = Path(os.path.abspath(folder))
    while not os.path.lexists(there):
        there = there.parent
    wrong = "no folder" if not there.is_dir() else "" if os.access(there, os.W_OK | os.X_OK) else "read-only"
    if wrong:
        which = "it" if there == asked else there
        raise refuse(flag, folder, f"must be a folder that can be written to; {which} is {wrong}")


def aside_of(path: str | os.PathLike[str]) -> Path:
    """Return a hidden path in the folder of ``path``, unique to this call. Nothing is made there."""
    path = Path(path)
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def publish(aside: Path, path: str | os.PathLike[str]) -> None:
    """Sync the file or folder ``aside``, rename it to ``path``, and sync the rename.

    Replaces a file. If ``path`` is a folder that is not empty, raises :class:`OSError` and leaves ``aside`` as it was.
    """
    path = Path(path)
    sync(aside)
    os.replace(aside, path)
    _sync(path.parent)


def sync(path: Path) -> None:
    """Wait until the file or folder ``path`` is on disk, with all its content."""
    for inner in [*path.rglob("*"), path] if path.is_dir() else [path]:
        _sync(inner)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems cannot sync a folder.
        if error.errno not in (errno.EINVAL, errno.EBADF) or not path.is_dir():
            raise
    finally:
        os.close(handle)
