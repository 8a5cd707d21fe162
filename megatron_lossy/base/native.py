"""C libraries of the package: those of a wheel, or compiled at their first use, once per user, source and compiler."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .errors import UsageError

FLAGS = ("-std=gnu11", "-O2", "-Wall", "-Wextra", "-ffp-contract=off", "-fPIC", "-shared", "-fvisibility=hidden")
_PACKAGE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Library:
    """One library. ``flag`` and ``what`` are the flag that needs it and its name in errors."""

    name: str
    #: The file that is compiled. It may include others of its folder.
    source: Path
    flag: str
    what: str
    #: Options of the compiler after :data:`FLAGS`.
    options: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    def path(self) -> Path:
        """Return the library of the wheel or of the user's cache. Compile it if there is neither.

        Raise :class:`UsageError` without a compiler, or if it fails. Ranks that start together may all compile it.
        """
        shipped = self.shipped()
        if shipped.exists():
            return shipped
        folder, cc = cache_folder(self.flag, self.what), compiler()
        if cc is None:
            built = next(iter(sorted(folder.glob(f"{shipped.stem}-*.so"))), None)
            if built is None:
                raise UsageError(f"{self.flag}: needs a C compiler to build {self.what} once: install gcc, or set CC")
            return built
        version = subprocess.run([cc, "--version"], capture_output=True, check=False).stdout
        path = folder / f"{shipped.stem}-{hashlib.blake2b(version, digest_size=4).hexdigest()}.so"
        if not path.exists():
            self.compile(cc, path)
        return path

    def shipped(self) -> Path:
        """Return the place of the library in a wheel: next to its sources, named by them, options and processor."""
        parts = [part.read_bytes() for part in sorted(self.source.parent.glob("*.[ch]"))]
        options = " ".join([*FLAGS, *self.options]).encode()
        digest = hashlib.blake2b(b"".join([*parts, options]), digest_size=8).hexdigest()
        return self.source.with_name(f"{self.name}-{platform.machine()}-{digest}.so")

    def compile(self, cc: str, path: Path, extra: Sequence[str] = ()) -> None:
        """Compile the library with ``extra`` options to ``path``, where it appears only when it is complete.

        Raise :class:`UsageError`.
        """
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            aside = Path(folder, path.name)
            command = [cc, *FLAGS, *self.options, *extra, "-o", str(aside), str(self.source), *self.links]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                raise UsageError(f"{self.flag}: {cc} cannot be run to build {self.what}: {error.strerror}") from None
            if done.returncode:
                lines = done.stderr.splitlines() or ["?"]
                first = next((line for line in lines if "error" in line), lines[0])
                raise UsageError(f"{self.flag}: {cc} cannot build {self.what}: {first}")
            aside.replace(path)


_ENGINE = _PACKAGE / "transport" / "udp" / "c" / "engine.c"
_BLOCKS = _PACKAGE / "base" / "coding" / "c" / "blocks.c"
#: The engine of datagrams.
ENGINE = Library("engine", _ENGINE, "--transport udp", "its engine", ("-pthread",), ("-ldl", "-lm"))
#: Codes in blocks, for tensors of a CPU.
BLOCKS = Library("blocks", _BLOCKS, "--grad-wire, --param-wire", "the codes of a CPU", ("-O3",))


def compiler() -> str | None:
    """Return ``CC``, or the first of the usual names that is installed."""
    names = [os.environ.get("CC", ""), "cc", "gcc", "clang"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def cache_folder(flag: str, what: str) -> Path:
    """Return the folder of the user's libraries; below the temporary folder if the home cannot be written.

    Raise :class:`UsageError` that ``flag`` needs it for ``what`` if neither can be written.
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
