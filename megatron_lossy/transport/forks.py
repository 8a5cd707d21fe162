"""Sockets that forked children of this process close: the workers of a loader live for a while after a rank that was killed.

With its sockets open in them, others see neither that the rank has ended nor that its port is free.
"""

from __future__ import annotations

import os
import socket
import weakref

_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def close_in_children(made: socket.socket) -> socket.socket:
    """Return ``made``, which children that this process forks from now on close."""
    _sockets.add(made)
    return made


def _close() -> None:
    for made in _sockets:
        made.close()


os.register_at_fork(after_in_child=_close)
