"""The place of a call: the innermost line of code that somebody could change."""

from __future__ import annotations

import functools
import sys
import threading
import types
from typing import NamedTuple

#: Folders of code, by what they are called here.
HOMES = dict(megatron_lossy="/megatron_lossy/", megatron="/megatron/core/", torch="/torch/optim/", tests="/tests/")
#: Code that does nothing of its own will: it watches, or fetches what another line wants.
_FOR_OTHERS = ("/tests/impostor/", "/megatron_lossy/base/fetch.py")
#: The function of calls that come from no line of :data:`HOMES`: mostly kernels of the backward pass.
NOWHERE = "autograd"


class Place(NamedTuple):
    """A line of code. ``home``: a key of :data:`HOMES`; ``file``: below it; ``aside``: in a thread of its own."""

    home: str
    file: str
    function: str
    line: int
    aside: bool = False

    @property
    def name(self) -> str:
        """``file:function``, which lines added above do not change."""
        return f"{self.file}:{self.function}" if self.file else self.function

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} ({self.function})" if self.file else self.function
        return where + ", in a thread aside" * self.aside


@functools.cache
def _home(path: str) -> tuple[str, str] | None:
    """Return the home of a file, and its path below."""
    if any(one in path for one in _FOR_OTHERS):
        return None
    for home, folder in HOMES.items():
        if folder in path:
            return home, path.rpartition(folder)[2]
    return None


def _aside() -> bool:
    """Return whether a thread of the program runs this. Those of autograd, unknown to Python, work for the step."""
    return not isinstance(threading.current_thread(), threading._MainThread | threading._DummyThread)


def place() -> Place:
    """Return the innermost line of a home."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        found = _home(frame.f_code.co_filename)
        if found is not None:
            return Place(*found, frame.f_code.co_name, frame.f_lineno, _aside())
        frame = frame.f_back
    return Place("torch", "", NOWHERE, 0, _aside())
