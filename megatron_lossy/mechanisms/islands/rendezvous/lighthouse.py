"""torchft's lighthouse as a rendezvous: its client alone; nothing else of torchft takes part.

A lighthouse answers once every replica whose heartbeat it hears has asked. A process that comes again has another name, so that
who died and who came are two. Its ``quorum_id`` begins anew with the lighthouse, and is not used.
"""

from __future__ import annotations

import importlib
import os
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from ....base.errors import UsageError, first_line, refuse

#: Seconds between signs of life; to connect; for an answer beside the time until a death is noticed.
HEARTBEAT, CONNECT, ANSWER = 0.5, 2.0, 5.0
#: Of a lighthouse: seconds after which a silent one is dead, and for which others are waited for that have not asked.
TIMEOUT, JOIN = 5.0, 2.0
#: Seconds between two attempts to connect to a lighthouse, and between two looks whether a connection still holds.
_AGAIN, _LOOK = 0.5, 0.1
#: Seconds in which all find a lighthouse that is back, and ask it. Before that it takes those who have not for dead.
_ALL_BACK = 2 * CONNECT
#: Seconds in which a lighthouse that is there answers for the first time, also if the first attempt to connect fails.
LEAST_WAIT = _ALL_BACK + 2 * CONNECT
#: Signs of life in a row that take too long: then a connection is given up.
_UNHEARD = 2
#: Characters of an error.
_LINE = 120
PORT = 29510
#: The message of one process: values that JSON can hold.
Data = Mapping[str, Any]


class Unreachable(RuntimeError):
    """No lighthouse answers, for now."""


def torchft() -> Any:
    """torchft's clients and servers. Raises :class:`UsageError` without torchft."""
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise each connection and each answer is logged
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


class Lighthouse:
    """The lighthouses at ``addresses`` (URLs), of which the first that answers counts, each time anew.

    ``name``: of this process alone, for its life. ``timeout``: seconds after which the lighthouses take a silent one for dead.
    """

    def __init__(self, addresses: Sequence[str], name: str, timeout: float = TIMEOUT) -> None:
        self.timeout = timeout
        self._name = name
        self._library = torchft()
        self._doors = [_Door(address) for address in addresses]
        self._end = threading.Event()
        self._questions: list[_Question] = []
        self._threads = [
            threading.Thread(target=self._live, args=[door], name="rendezvous", daemon=True) for door in self._doors
        ]
        for thread in self._threads:
            thread.start()

    def ask(self, step: int, data: Data) -> list[Data]:
        """Send ``data`` of this process. Return those of all that are alive, this one too, in no order.

        ``step``: rises with what has been done. Whoever asks at about the same time gets the same answer. It comes once all that
        are alive have asked, and so it may take until a death is noticed. Raises :class:`Unreachable`.
        """
        whys, before = [], list[_Door]()
        for door in self._doors:
            door.tried.wait(2 * CONNECT)
            answer = self._ask(door, before, step, data)
            if answer is not None:
                return answer
            whys.append(f"{door.address} ({door.why or 'no answer yet'})")
            before.append(door)
        raise Unreachable("nobody answers at " + ", ".join(whys))

    def _ask(self, door: _Door, before: Sequence[_Door], step: int, data: Data) -> list[Data] | None:
        """The answer at ``door``; ``None``: there is none, it is not to be believed, or one of those ``before`` it came back meanwhile."""
        client, believed = door.client, door.believed
        if client is None or door.lost:
            return None
        patience = timedelta(seconds=self.timeout + ANSWER)
        question = _Question(
            lambda: client.quorum(self._name, patience, "", "", step, 1, False, data=dict(data)).participants
        )
        self._questions = [one for one in self._questions if one.is_alive()] + [question]
        away = [one for one in before if not one.believed]
        while question.is_alive() and client is door.client and not (door.lost or any(one.believed for one in away)):
            question.join(_LOOK)
        if question.error is not None and client is door.client:  # of Rust, of several kinds: refused, reset, timed out
            door.why = _line(question.error)
            door.lost |= not isinstance(question.error, TimeoutError)
        if question.answer is None or not believed:
            return None
        return [one.data for one in question.answer if one.data is not None]

    def close(self) -> None:
        """End the signs of life: the others need not wait until a death is noticed."""
        self._end.set()
        for thread in (*self._threads, *self._questions):
            thread.join()

    def _live(self, door: _Door) -> None:
        """Connect to a lighthouse, and say every while that this process is alive.

        A connection over which no sign of life gets is given up. It would come back by itself, but TCP, which asks ever more rarely,
        takes as long for that as nothing got through.
        """
        unheard = 0
        while not self._end.is_set():
            if door.client is None or door.lost:
                try:
                    door.found(self._library.LighthouseClient(door.address, timedelta(seconds=CONNECT)))
                except Exception as error:
                    door.client, door.why = None, _line(error)
                door.tried.set()
            if door.client is None:
                self._end.wait(_AGAIN)
                continue
            try:
                door.client.heartbeat(self._name, timedelta(seconds=CONNECT))
                unheard = 0
            except Exception as error:
                unheard += 1
                if unheard == _UNHEARD or not isinstance(error, TimeoutError):
                    unheard, door.why, door.lost = 0, _line(error), True
            self._end.wait(HEARTBEAT)


def _line(error: Exception) -> str:
    line = first_line(error)
    cut = textwrap.shorten(line, _LINE, placeholder=" …")
    return cut if len(cut) > 2 else line[:_LINE]  # of one long word nothing would be left


class _Question(threading.Thread):
    """A call that is under way at once, and may never be waited for. One of ``answer`` and ``error`` is set when it is over."""

    def __init__(self, call: Callable[[], list[Any]]) -> None:
        super().__init__(name="rendezvous", daemon=True)
        self._call = call
        self.answer: list[Any] | None = None
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self._call()
        except Exception as error:
            self.error = error


class _Door:
    """One lighthouse. ``client``: while connected. ``lost``: the connection is to be made anew. ``tried``: to connect, once.

    ``why`` it is not connected, or not believed.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.client: Any = None
        self.why = ""
        self.lost = False
        self.tried = threading.Event()
        self._believed_at = 0.0

    def found(self, client: Any) -> None:
        """It is connected."""
        if self.lost or self.why:
            self._believed_at = time.monotonic() + _ALL_BACK
            self.why = "it is back, and others may not know that yet"
        self.client, self.lost = client, False

    @property
    def believed(self) -> bool:
        """Whether all who live have had time to ask it, by now."""
        return self.client is not None and not self.lost and time.monotonic() >= self._believed_at
