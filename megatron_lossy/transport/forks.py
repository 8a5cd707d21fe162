"""Objects that forked children of this process let go of: the workers of a loader live for a while after a rank that was killed.

With its sockets open in them, others see neither that the rank has ended nor that its port is free.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable
from typing import TypeVar

Held = TypeVar("Held")
_held: weakref.WeakKeyDictionary[object, Callable[..., object]] = weakref.WeakKeyDictionary()


def in_children(made: Held, let_go: Callable[[Held], object]) -> Held:
    """Return ``made``, for which children that this process forks from now on call ``let_go``."""
    _held[made] = let_go
    return made


def close_in_children(made: socket.socket) -> socket.socket:
    """Return ``made``, which children that this process forks from now on close."""
    return in_children(made, socket.socket.close)


def _forked() -> None:
    for made, let_go in list(_held.items()):
        let_go(made)


os.register_at_fork(after_in_child=_forked)
