"""Compiles the engine at its first use, once per user, source and compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...errors import UsageError

#: The parts are included by the first; all of them are the source.
FOLDER = Path(__file__).with_name("c")
SOURCE = FOLDER / "engine.c"
FLAGS = (
    "-std=gnu11",
    "-O2",
    "-Wall",
    "-Wextra",
    "-ffp-contract=off",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-pthread",
)


def compiler() -> str | None:
    """``CC``, or the first of the usual names that is installed."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cache_folder() -> Path:
    """The folder of the user's libraries; below the temporary folder if the home cannot be written."""
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
    raise UsageError(f"--transport udp: neither {wanted} nor {fallback} can be written to build its engine in")


@functools.cache
def library() -> Path:
    """The compiled engine. Ranks that start together may all compile it: each writes a file aside and renames it."""
    parts = [part.read_bytes() for part in sorted(FOLDER.glob("*.[ch]"))]
    source = hashlib.blake2b(b"".join([*parts, " ".join(FLAGS).encode()]), digest_size=8).hexdigest()
    stem = f"engine-{platform.machine()}-{source}"
    folder = cache_folder()
    cc = compiler()
    if cc is None:
        built = sorted(folder.glob(f"{stem}-*.so"))
        if built:
            return built[0]
        raise UsageError("--transport udp: needs a C compiler to build its engine once: install gcc, or set CC")
    version = subprocess.run([cc, "--version"], capture_output=True, check=False).stdout
    path = folder / f"{stem}-{hashlib.blake2b(version, digest_size=4).hexdigest()}.so"
    if not path.exists():
        compile_library(cc, path)
    return path


def compile_library(cc: str, path: Path, extra: Sequence[str] = ()) -> None:
    """Compile the engine with ``extra`` flags to ``path``. The file appears there only when it is complete."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        aside = Path(folder, path.name)
        command = [cc, *FLAGS, *extra, "-o", str(aside), str(SOURCE), "-ldl"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except OSError as error:
            raise UsageError(f"--transport udp: {cc} cannot be run to build its engine: {error.strerror}") from None
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise UsageError(f"--transport udp: {cc} cannot build its engine: {lines[0]}")
        aside.replace(path)
