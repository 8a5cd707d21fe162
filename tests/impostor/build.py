"""Compiles the pretended device at its first use, once per user, source, torch and compiler."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from megatron_lossy.base.native import cache_folder

SOURCES = Path(__file__).with_name("csrc")
NAME = "_impostor"
FLAGS = tuple(
    f"-O1 -fPIC -shared -fvisibility=hidden -DUSE_DISTRIBUTED -DUSE_C10D -DTORCH_EXTENSION_NAME={NAME}".split()
)


class CannotBuild(RuntimeError):
    """The device cannot be compiled on this machine, and why."""


def compilers() -> list[str]:
    """Return ``CXX`` and the usual names, of those that are installed."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return [found for name in names if name and (found := shutil.which(name))]


def compiler() -> str:
    """Return the first of :func:`compilers`. Raise :class:`CannotBuild`."""
    if found := compilers():
        return found[0]
    raise CannotBuild("needs a C++ compiler: install g++, or set CXX")


def standard() -> str:
    """Return the C++ that torch's headers need: C++20 from 2.12 on."""
    major, minor = map(int, torch.__version__.split(".")[:2])
    return "-std=c++20" if (major, minor) >= (2, 12) else "-std=c++17"


@functools.cache
def library() -> Path:
    """Return the compiled device. Raise :class:`CannotBuild`."""
    text = b"".join(path.read_bytes() for path in sorted([*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")]))
    key = text + repr((FLAGS, torch.__version__, platform.python_version())).encode()
    stem = f"impostor-{platform.machine()}-{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    path = cache_folder("tests", "the pretended device") / f"{stem}.so"
    if not path.exists():
        _build(path)
    return path


def _build(path: Path) -> None:
    """Compile all files as one, which takes half of the time: most of it goes to torch's headers. Two may do so at once."""
    root = Path(torch.__file__).parent
    folders = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        everything, aside = Path(folder, "everything.cpp"), Path(folder, path.name)
        everything.write_text("".join(f'#include "{source}"\n' for source in sorted(SOURCES.glob("*.cpp"))))
        command = [compiler(), standard(), *FLAGS, *(f"-isystem{one}" for one in folders), str(everything)]
        command += ["-o", str(aside), f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise CannotBuild(f"{command[0]} cannot compile it: {lines[0]}")
        aside.replace(path)


def load() -> ModuleType:
    """Return the extension module, in this process. It cannot be unloaded."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(library())
