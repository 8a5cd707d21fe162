"""A place where the ranks of one number of all islands meet, in the store: what each says to others that it is to connect with.

Each rank has one value. It is written and read on a thread, during a wait for it, or once in a while.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
from collections.abc import Callable, Collection

from ...base.errors import first_line
from .membership.messages import Member, Preparation, read, slot_of
from .membership.store import Store

logger = logging.getLogger(__name__)

#: Seconds between two looks into the store while two ranks talk, and seconds for an answer of the other one.
_LOOK, _ANSWER = 0.1, 30.0
#: The key of what islands prepare.
_PREPARED = "now/prepare"
#: By the name of a pair: its session, and what is said in it.
_Said = dict[str, dict[str, str]]


class NoAnswer(ConnectionError):
    """The other rank has begun anew, does not answer, or is not wanted any more."""


class Meeting:
    """Rank ``rank`` of ``size`` of the island ``me``, on a thread from :meth:`begin` until :meth:`end`.

    ``wanted``: is called on it with each new preparation of an epoch that has this island. ``every``: seconds between two looks for one.
    """

    def __init__(
        self, store: Store, rank: int, size: int, me: Member, wanted: Callable[[Preparation], None], every: float
    ) -> None:
        self._store, self._rank, self._size, self._me = store, rank, size, me
        self._wanted, self._every = wanted, every
        self.changed = threading.Condition()
        self.said: _Said = {}
        #: By slot, what others say, as far as it was read.
        self.from_others: dict[int, _Said] = {}
        self._up: tuple[str, list[Member]] = ("", [])
        self._ranks: list[tuple[str, list[Member]]] = [("", [])] * (size - 1)
        self.talks = 0
        self._written = self._prepared = ""
        self.ended = False
        self._thread = threading.Thread(target=self._run, name="megatron-lossy-meeting", daemon=True)

    def begin(self) -> None:
        """Begin the thread."""
        self._thread.start()

    def connected(self, nonce: str, members: Collection[Member]) -> None:
        """Publish the connections of this rank for the preparation ``nonce``."""
        with self.changed:
            self._up = nonce, sorted(members)
            self.changed.notify_all()

    def all_connected(self, nonce: str) -> set[Member]:
        """Return the members with which all ranks of this island are connected, as the first one has read it."""
        with self.changed:
            return set.intersection(*(set(there) if of == nonce else set() for of, there in (self._up, *self._ranks)))

    def end(self) -> None:
        """End the thread."""
        with self.changed:
            self.ended = True
            self.changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while not self.ended:
            pause = _LOOK
            try:
                self._look()
            except Exception as error:  # nothing that comes from the store may end a healthy island
                logger.debug("meeting: %s", first_line(error))
                pause = self._every
            with self.changed:
                self.changed.notify_all()
                self.changed.wait_for(lambda: self.ended, pause)
                self.changed.wait_for(
                    lambda: self.ended or self.talks > 0 or self._text() != self._written, self._every
                )

    def _look(self) -> None:
        with self.changed:
            text, talks = self._text(), self.talks
        if text != self._written:
            self._store.put(self._key(self._rank), text)
            self._written = text
        prepared = self._store.get(_PREPARED) or ""
        if prepared != self._prepared:
            found = read(Preparation, prepared)
            if found is not None and self._me in found.candidates:
                self._wanted(found)
            self._prepared = prepared
        if talks:
            texts = self._store.list(f"meet/{self._rank}/")
            others = {int(key.rpartition("/")[2]): _parsed(value)[1] for key, value in texts.items()}
            with self.changed:
                self.from_others = others
        if self._rank == 0:
            ranks = [_parsed(self._store.get(self._key(rank)), self._me)[0] for rank in range(1, self._size)]
            with self.changed:
                self._ranks = ranks

    def _key(self, rank: int) -> str:
        return f"meet/{rank}/{slot_of(self._me)}"

    def _text(self) -> str:
        return json.dumps({"me": self._me, "up": self._up, "said": self.said}, sort_keys=True)


class Talk:
    """The words of two ranks that connect: the ``store`` of their channel. A context manager.

    ``nonce``: of the preparation. ``me``, ``other``: the members. ``closing``: set to end it. The rank of the lower slot names the
    session, a new one each time; ``former`` is the one before. Messages stay until :meth:`forget`: the other one may yet read them.
    """

    def __init__(
        self, meeting: Meeting, nonce: str, me: Member, other: Member, closing: threading.Event, former: str
    ) -> None:
        self._meeting, self._closing, self._former, self._slot = meeting, closing, former, slot_of(other)
        self._own, self._others = f"{nonce} {other}", f"{nonce} {me}"
        self._leads = slot_of(me) < self._slot
        #: Until there is a new one the session before: a talk that fails must not let the next one join that again.
        self.session = former

    def __enter__(self) -> Talk:
        with self._meeting.changed:
            self._meeting.talks += 1
            self._meeting.changed.notify_all()
        try:
            self.session = secrets.token_hex(8) if self._leads else self._wait("session")
            with self._meeting.changed:
                self._meeting.said[self._own] = {"session": self.session}
                self._meeting.changed.notify_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._meeting.changed:
            self._meeting.talks -= 1

    def forget(self) -> None:
        """Take back what was said."""
        with self._meeting.changed:
            self._meeting.said.pop(self._own, None)

    def set(self, key: str, value: bytes) -> None:
        """Publish ``value``."""
        with self._meeting.changed:
            self._meeting.said[self._own][key] = bytes(value).hex()
            self._meeting.changed.notify_all()

    def get(self, key: str) -> bytes:
        """Wait for what one of them has said. Raise :class:`NoAnswer`."""
        own = self._meeting.said[self._own].get(key)
        return bytes.fromhex(self._wait(key) if own is None else own)

    def _wait(self, key: str) -> str:
        meeting = self._meeting

        def heard() -> str | None:
            found = meeting.from_others.get(self._slot, {}).get(self._others, {})
            session, answer = found.get("session"), found.get(key)
            return answer if (session != self._former if key == "session" else session == self.session) else None

        with meeting.changed:
            meeting.changed.wait_for(lambda: heard() is not None or meeting.ended or self._closing.is_set(), _ANSWER)
            answer = heard()
        if answer is None:
            raise NoAnswer(f"island {self._slot} does not answer")
        return answer


def _parsed(text: str | None, me: Member | None = None) -> tuple[tuple[str, list[Member]], _Said]:
    """Return what a rank has written: with whom it is connected, and what it says. ``me``: whose it must be. Anything else is nothing."""
    try:
        found = json.loads(text or "")
        (nonce, members), said = found["up"], found["said"]
        fits = me in (None, found["me"]) and all(type(name) is str for name in (nonce, *members))
        if fits and all(type(value) is str for pair in said.values() for value in pair.values()):
            return (nonce, members), said
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        pass
    return ("", []), {}
