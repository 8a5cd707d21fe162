"""This process's ends on the network, made from the flags: engines of datagrams, and hosts of streams. All groups share them."""

from __future__ import annotations

import atexit
import os
from collections import Counter
from typing import Any

from ..config import LossyConfig
from .address import find_address
from .settings import settings_of

#: By transport, settings and address.
_ends: dict[tuple[str, Any, str], Any] = {}


def end_for(config: LossyConfig, towards: str | None = None) -> Any:
    """Return the :class:`.Engine`, or the :class:`.Host` of streams, for these flags; :func:`close_ends` ends it.

    ``towards``: a host; without ``--udp-interface`` the address is the one that reaches it. Default: MASTER_ADDR.
    """
    if config.transport == "udp":
        from .udp.engine import made
    else:
        from .stream.host import Host as made
    settings = settings_of(config)
    address = find_address(settings.interface, towards or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    key = "udp" if config.transport == "udp" else "stream", settings, address
    if key not in _ends or _ends[key].closed:  # in a child process
        _ends[key] = made(settings, address, int(os.environ.get("LOCAL_RANK", 0)))
        # An engine has registered an end without patience. This is registered later, and so runs earlier.
        atexit.unregister(close_ends)
        atexit.register(close_ends)
    return _ends[key]


def end_counters() -> Counter[str]:
    """Return counters of the sockets of this process that belong to no rank."""
    found: Counter[str] = Counter()
    for end in _ends.values():
        found.update(end.counters())
    return found


def close_ends() -> None:
    """Close every channel and socket, once others have all sent data. Runs when the process ends, too."""
    while _ends:
        _ends.popitem()[1].close()
