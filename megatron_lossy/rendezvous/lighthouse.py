"""torchft's lighthouse as a rendezvous: its client alone; nothing else of torchft takes part.

A lighthouse answers once every replica whose heartbeat it hears has asked. A process that comes again has another name, so that
who died and who came are two. Its ``quorum_id`` begins anew with the lighthouse, and is not used.
"""

from __future__ import annotations

import importlib
import math
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from datetime import timedelta
from typing import Any

from ..errors import UsageError, first_line, refuse
from .base import Data, Rendezvous, Unreachable

#: Seconds between signs of life; to connect; for an answer beside the time until a death is noticed.
HEARTBEAT, CONNECT, ANSWER = 0.5, 2.0, 5.0
#: Of a lighthouse: seconds after which a silent one is dead, and for which others are waited for that have not asked.
TIMEOUT, JOIN = 5.0, 2.0
#: Seconds between two attempts to connect to a lighthouse, and between two looks whether a connection still holds.
_AGAIN, _LOOK = 0.5, 0.1
#: Seconds in which all find a lighthouse that is back. Before that it takes those who have not for dead.
_ALL_BACK = CONNECT + 2 * _AGAIN
#: Questions to one lighthouse under way. All but the latest are of connections given up, and end with their time.
_QUESTIONS = 16
#: Characters of an error.
_LINE = 120
PORT = 29510


def torchft() -> Any:
    """torchft's clients and servers. Raises :class:`UsageError` without torchft."""
    try:
        return importlib.import_module("torchft.coordination")
    except ImportError as error:
        why = f"needs torchft ({error}): pip install 'megatron-lossy[elastic]'"
        raise UsageError(f"--rendezvous: {why}") from None


def addresses_of(text: str) -> list[str]:
    """The URLs of ``--rendezvous ADDR[,ADDR]``. ADDR: HOST or HOST:PORT. Raises :class:`UsageError`."""
    found = []
    for one in text.split(","):
        bare = one.removeprefix("http://").strip()
        host, colon, port = bare.rpartition(":")
        if not colon or bare.endswith("]"):
            host, port = bare, str(PORT)
        if (
            not host
            or "/" in bare
            or not port.isdigit()
            or not 0 < int(port) < 65536
            or (":" in host and host[0] != "[")
        ):
            raise refuse(
                "--rendezvous", text, "must be HOST:PORT, or several with commas in between; IPv6 as [::1]:29510"
            )
        found.append(f"http://{host}:{port}")
    return found


class Lighthouse(Rendezvous):
    """The lighthouses at ``addresses`` (URLs), of which the first that answers counts, each time anew.

    ``name``: of this process alone, for its life. ``timeout``: seconds after which the lighthouses take a silent one for dead.
    """

    def __init__(self, addresses: Sequence[str], name: str, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._name = name
        os.environ.setdefault("RUST_LOG", "warn")  # else the client says each time that it connects
        self._library = torchft()
        self._doors = [_Door(address) for address in addresses]
        self._end = threading.Event()
        self._questions = ThreadPoolExecutor(_QUESTIONS, thread_name_prefix="rendezvous")
        self._threads = [
            threading.Thread(target=self._live, args=[door], name="rendezvous", daemon=True) for door in self._doors
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, step: int, data: Data) -> list[Data]:
        whys = []
        for door in self._doors:
            door.tried.wait(2 * CONNECT)
            client = door.client
            if client is None or time.monotonic() < door.usable_at:
                whys.append(f"{door.address} ({door.why})")
                continue
            patience = timedelta(seconds=self.timeout + ANSWER)
            question = self._questions.submit(
                client.quorum, self._name, patience, "", "", step, 1, False, data=dict(data)
            )
            while client is door.client and not wait([question], _LOOK).done:
                pass
            if not question.done():
                question.cancel()
                whys.append(f"{door.address} (the connection was lost)")
                continue
            if (error := question.exception()) is not None:  # of Rust, of several kinds: refused, reset, timed out
                door.lose(error)
                whys.append(f"{door.address} ({door.why})")
                continue
            return [one.data for one in question.result().participants if one.data is not None]
        raise Unreachable("nobody answers at " + ", ".join(whys))

    def close(self) -> None:
        self._end.set()
        for thread in self._threads:
            thread.join()
        self._questions.shutdown()

    def _live(self, door: _Door) -> None:
        """Connect to a lighthouse, and say every while that this process is alive.

        A connection over which no sign of life gets is given up. It would come back by itself, but TCP, which asks ever more rarely,
        takes as long for that as nothing got through.
        """
        client = None
        while not self._end.is_set():
            if client is None or door.usable_at == math.inf:
                client = None
                try:
                    client = self._library.LighthouseClient(door.address, timedelta(seconds=CONNECT))
                except Exception as error:
                    door.why = first_line(error)[:_LINE]
                door.found(client)
                door.tried.set()
            if client is None:
                self._end.wait(_AGAIN)
                continue
            try:
                client.heartbeat(self._name, timedelta(seconds=CONNECT))
            except Exception as error:
                door.lose(error)
            self._end.wait(HEARTBEAT)


class _Door:
    """One lighthouse. ``client``: while connected. ``why``: not connected, or not before ``usable_at``. ``tried``: to connect, once."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.client: Any = None
        self.why = ""
        self.usable_at = 0.0
        self.tried = threading.Event()

    def lose(self, error: Exception) -> None:
        """The connection holds no more, or does not answer."""
        self.why, self.usable_at = first_line(error)[:_LINE], math.inf

    def found(self, client: Any) -> None:
        """``client`` is connected, or ``None``: nobody is there."""
        if client is not None and (self.why or self.usable_at):
            self.usable_at, self.why = time.monotonic() + _ALL_BACK, "it is back, and others may not know that yet"
        self.client = client
