"""Compiles the pretended device at its first use, once per user, source, torch and compiler."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import platform
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from megatron_lossy.transport.udp.build import cache_folder

FOLDER = Path(__file__).parent
NAME = "_impostor"
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-DUSE_DISTRIBUTED", "-DUSE_C10D", f"-DTORCH_EXTENSION_NAME={NAME}")


class CannotBuild(RuntimeError):
    """The device cannot be compiled on this machine, and why."""


def compiler() -> str:
    """``CXX``, or the first of the usual names that is installed. Raises :class:`CannotBuild`."""
    import os

    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    for name in names:
        if name and (found := shutil.which(name)):
            return found
    raise CannotBuild("needs a C++ compiler: install g++, or set CXX")


def sources() -> list[Path]:
    return sorted(FOLDER.glob("*.cpp"))


@functools.cache
def library() -> Path:
    """The compiled device. Raises :class:`CannotBuild`."""
    text = b"".join(path.read_bytes() for path in sorted([*sources(), *FOLDER.glob("*.h")]))
    key = text + repr((FLAGS, torch.__version__, platform.python_version())).encode()
    stem = f"impostor-{platform.machine()}-{hashlib.blake2b(key, digest_size=8).hexdigest()}"
    path = cache_folder() / f"{stem}.so"
    if not path.exists():
        _compile(path)
    return path


def _compile(path: Path) -> None:
    root = Path(torch.__file__).parent
    include = [root / "include", root / "include/torch/csrc/api/include", sysconfig.get_paths()["include"]]
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        aside = Path(folder, path.name)
        command = [compiler(), *FLAGS, *(f"-I{one}" for one in include), *map(str, sources()), "-o", str(aside)]
        command += [f"-L{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["?"]
            raise CannotBuild(f"{command[0]} cannot compile it: {lines[0]}")
        aside.replace(path)


def load() -> ModuleType:
    """The extension module, in this process. It cannot be unloaded."""
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    print(library())
