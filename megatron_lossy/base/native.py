"""C sources of the package, compiled at their first use, once per user, source and compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import UsageError

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")


def compiler() -> str | None:
    """``CC``, or the first of the usual names that is installed."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cache_folder(flag: str, what: str) -> Path:
    """The folder of the user's libraries; below the temporary folder if the home cannot be written.

    ``flag``, ``what``: what needs it, for the :class:`UsageError` if there is none.
    """
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron_lossy"
    fallback = Path(tempfile.gettempdir()) / f"megatron_lossy-{os.getuid()}"
    for folder in (wanted, fallback):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # A library that is loaded from here runs as this user.
            if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK | os.X_OK):
                return folder
        except OSError:
            continue
    raise UsageError(f"{flag}: neither {wanted} nor {fallback} can be written to build {what} in")


def built(
    name: str, sources: Path, flags: Sequence[str], folder: Path, cc: str | None, compile: Callable[[str, Path], None]
) -> Path | None:
    """The library ``name`` of the folder ``sources`` in ``folder``; ``None`` if it is not there, and there is no ``cc``.

    Ranks that start together may all compile it: ``compile(cc, path)`` writes a file aside and renames it.
    """
    parts = [part.read_bytes() for part in sorted(sources.glob("*.[ch]"))]
    source = hashlib.blake2b(b"".join([*parts, " ".join(flags).encode()]), digest_size=8).hexdigest()
    stem = f"{name}-{platform.machine()}-{source}"
    if cc is None:
        return next(iter(sorted(folder.glob(f"{stem}-*.so"))), None)
    version = subprocess.run([cc, "--version"], capture_output=True, check=False).stdout
    path = folder / f"{stem}-{hashlib.blake2b(version, digest_size=4).hexdigest()}.so"
    if not path.exists():
        compile(cc, path)
    return path


def compile_to(path: Path, source: Path, cc: str, options: Sequence[str], flag: str, what: str) -> None:
    """Compile ``source`` to ``path``, where it appears only when it is complete. Raises :class:`UsageError`.

    ``flag``, ``what``: as of :func:`cache_folder`.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        aside = Path(folder, path.name)
        before, after = ([one for one in options if one.startswith("-l") == last] for last in (False, True))
        command = [cc, *before, "-o", str(aside), str(source), *after]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UsageError(f"{flag}: {cc} cannot be run to build {what}: {error.strerror}") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise UsageError(f"{flag}: {cc} cannot build {what}: {lines[0]}")
        aside.replace(path)
