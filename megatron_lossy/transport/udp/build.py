"""Compiles the engine at its first use."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

from ...base import native
from ...base.errors import UsageError
from ...base.native import compiler

#: The parts are included by the first; all of them are the source.
FOLDER = Path(__file__).with_name("c")
SOURCE = FOLDER / "engine.c"
FLAGS = (*native.FLAGS, "-pthread")
_FLAG, _WHAT = "--transport udp", "its engine"


def cache_folder() -> Path:
    """The folder of the user's libraries."""
    return native.cache_folder(_FLAG, _WHAT)


@functools.cache
def library() -> Path:
    """The compiled engine. Raises :class:`UsageError` without a compiler, if it was not compiled before."""
    path = native.built("engine", FOLDER, FLAGS, cache_folder(), compiler(), compile_library)
    if path is None:
        raise UsageError(f"{_FLAG}: needs a C compiler to build {_WHAT} once: install gcc, or set CC")
    return path


def compile_library(cc: str, path: Path, extra: Sequence[str] = ()) -> None:
    """Compile the engine with ``extra`` flags to ``path``. The file appears there only when it is complete."""
    native.compile_to(path, SOURCE, cc, [*FLAGS, *extra, "-ldl", "-lm"], _FLAG, _WHAT)
