"""A place where ranks of several islands meet: the store of one of them.

Torch's stores and groups wait in C++, and a process that ends meanwhile ends in an error. So whoever meets looks again and again
whether the others are there, and makes groups once they are.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch

_LOOK = 0.05  # seconds between two looks
_CONNECT = 1.0  # seconds for one attempt


class NotMet(RuntimeError):
    """Some did not come, or nobody wants to meet any more."""


def meet(
    place: tuple[str, int],
    prefix: str,
    own: str,
    all_of_them: Iterable[str],
    coming: float,
    patience: float,
    given_up: Callable[[], bool],
) -> Any:
    """Return the store at ``place``, host and port, below ``prefix``, once ``all_of_them`` are there, of which this one is ``own``.

    ``coming``: seconds to wait for the others. ``patience``: for each key later. ``given_up``: whether to stop waiting. Raises
    :class:`NotMet`, which names those that did not come, and errors of torch if the store is lost.
    """
    until, keys = time.monotonic() + coming, {f"here/{one}": one for one in all_of_them}

    def wait(there: Callable[[], bool], why: Callable[[], str]) -> None:
        while not there():
            if given_up():
                raise NotMet("given up")
            if time.monotonic() > until:
                raise NotMet(f"{why()} within {coming:g} s")
            time.sleep(_LOOK)

    def absent() -> str:
        missing = [one for key, one in keys.items() if not store.check([key])]
        return f"{', '.join(missing) or 'others'} did not come"

    wait(lambda: _answers(place), lambda: f"no answer from the store at {place[0]}:{place[1]}")
    server = torch.distributed.TCPStore(place[0], place[1], None, False, timedelta(seconds=patience))
    store = torch.distributed.PrefixStore(prefix, server)
    store.set(f"here/{own}", "")
    try:
        wait(lambda: store.check(list(keys)), absent)
    except NotMet:
        store.delete_key(f"here/{own}")  # else who comes later would wait for this one
        raise
    return store


def _answers(place: tuple[str, int]) -> bool:
    try:
        socket.create_connection(place, _CONNECT).close()
    except OSError:
        return False
    return True
