"""The part of the first rank of an island that comes and goes: it polls the store on a thread, so that training waits for no answer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...base.errors import UsageError, first_line, refuse
from .membership.messages import Entry, Slot
from .membership.protocol import ANY, Island, Local, Plan, Times
from .membership.store import Store, split_address

logger = logging.getLogger(__name__)

TIMES = Times()
#: Seconds for the holder of a slot to answer.
_PROBE = 2.0
#: Begins all keys that a poll reads.
_NOW = "now/"


class LostSlot(UsageError):
    """A later start has the slot of this island."""

    status = 4


class FirstRank:
    """The part of the first rank: it polls ``store`` for ``part``, the :class:`.ElasticIslands` of ``me``, which begins after ``began`` iterations.

    It does so from :meth:`begin` until :meth:`close`, or until the island is refused or has lost its slot.
    """

    def __init__(self, part: Any, me: str, store: Store, began: int) -> None:
        config, self._part, self._connections, self._store = part.config, part, part._connections, store
        self.began, self._url = began, config.rendezvous
        #: The entries that have this island, with its role.
        self.found: list[tuple[Entry, str]] = []
        #: The error with which this island ends.
        self.ends: UsageError | None = None
        self._flags, self._join = part.flags(), config.island_join
        text = json.dumps(self._flags, sort_keys=True)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        self._plan, self._leaves = Plan(), threading.Event()
        self._answers: bool | None = None  # the holder of the slot
        self._gone = ""  # that holder, if it has ended for sure
        self._answered = time.monotonic()
        self._run: tuple[int | None, float] = (None, 0.0)  # how far the others are, and since when
        self._leapt = 0  # to this exchange, which the others have yet to make
        self._patience = config.island_patience
        self._address = self._connections.listen()
        times = replace(TIMES, join=config.island_join, alone=config.island_join)
        own = Slot(me, socket.gethostname()[:200], self._address, digest, _machine())
        self._island = Island(own, config.islands, times, time.monotonic())
        self._unwritten = {f"flags/{digest}": text}
        #: The reason why the last poll failed; empty after one that did not.
        self.why = ""
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._poll_on, name="megatron-lossy-membership", daemon=True)

    def begin(self) -> None:
        """Begin to poll."""
        self._thread.start()

    # --- on the thread that polls --------------------------------------------------------------------------------------

    def _poll_on(self) -> None:
        try:
            plan, last = Plan(), False
            while not (last or plan.refused or plan.lost):
                last = self._leaves.is_set()
                plan = self._poll(self._local()) or Plan()
                self._act(plan)
                self._leaves.wait(self._island.times.poll)
        except Exception as error:
            self._failed = error

    def _poll(self, local: Local) -> Plan | None:
        """Return the plan, which is written; ``None`` if the store did not answer, or holds an unknown format."""
        try:
            texts = {key.removeprefix(_NOW): text for key, text in self._store.list(_NOW).items()}
            plan = self._island.poll(time.monotonic(), texts, local)
            for change in plan.writes:
                if change.old is ANY:
                    self._store.put(_NOW + change.key, change.new)
                else:
                    self._store.put_if(_NOW + change.key, change.old, change.new)
        except Exception as error:  # nothing that comes from the store may end a healthy island
            self._island.missed()
            if not self.why:
                logger.warning("--rendezvous: %s; going on as before", first_line(error))
            self.why = first_line(error)
            return None
        if self.why:
            logger.warning("--rendezvous: answers again")
        self.why = ""
        return plan

    def _local(self) -> Local:
        for pair in self._connections.pairs:
            entry = pair.told()
            if entry is not None:
                self._island.adopt(entry)
        self._note()
        local, run = self._part.local(), self._plan.run
        if run is not None and run < self._leapt:  # no island follows one that is about to be where the others are
            made = min(local.exchange, run)
            local = replace(local, exchange=made, iteration=min(local.iteration, made * local.interval))
        return replace(local, leaves=self._leaves.is_set(), answers=self._answers, gone=self._gone)

    def _act(self, plan: Plan) -> None:
        self._plan = plan
        if not self.why:
            self._answered = time.monotonic()
            with contextlib.suppress(OSError):  # the next time
                for key, text in self._unwritten.items():
                    self._store.put(key, text)
                self._unwritten = {}
        for line in plan.lines:
            logger.warning("island %d: %s", self._part._slot, line)
        if plan.refused and self.ends is None:
            self.ends = self._difference(plan.flags) or UsageError(plan.refused)
        if plan.lost:
            self.ends = LostSlot(plan.lost)
        self._answers, self._gone = None, ""
        if (holder := plan.ask) is not None:  # at the address of this island is no other one
            found = _listens(holder.address) if holder.address != self._address else False
            own = self._island.own.machine
            self._answers = bool(found)
            self._gone = holder.me if found is False and own and holder.machine == own else ""
        self._note()

    def _note(self) -> None:
        """Note a newer entry, and send it to its members."""
        entry = self._island.entry
        if entry is None:
            return
        if not self.found or self.found[-1][0] != entry:
            self.found.append((entry, self._island.role))
        for pair in self._connections.among(entry).values():
            pair.say(entry)

    def _difference(self, digest: str) -> UsageError | None:
        """Return the first flag that differs from those of the run, whose digest is ``digest``, in words."""
        try:
            theirs = json.loads(self._store.get(f"flags/{digest}") or "{}") if digest else {}
        except (OSError, ValueError):
            theirs = {}
        mine, where = self._flags, (self._plan.refused or "").partition(": ")[2].partition(" has other")[0]
        for flag in sorted(mine.keys() | theirs.keys()) if theirs else ():
            if mine.get(flag) != theirs.get(flag):
                if flag == "layout":
                    return UsageError(f"--rendezvous: {where} has another model, optimizer, length or layout of ranks")
                return refuse(flag, mine.get(flag), f"{where} has {theirs.get(flag)}; all must be alike")
        return None

    # --- on the thread that trains -------------------------------------------------------------------------------------

    @property
    def begins(self) -> list[tuple[Entry, str]] | None:
        """The entries so far; ``None``: there are none. Raises :class:`UsageError` if this island cannot begin."""
        self._check()
        if self.ends is not None:
            raise self.ends
        silent = time.monotonic() - self._answered
        if self.why and silent >= self._join:
            why = f"no answer for {silent:.0f} s (--island-join {self._join:g}): {self.why}"
            raise refuse("--rendezvous", self._url, why)
        return list(self.found) or None

    def near(self, exchange: int, entry: Entry) -> bool:
        """Return whether the others will make ``exchange`` within the patience, stand still, or have a newer entry."""
        plan, now = self._plan, time.monotonic()
        run = -1 if plan.run is None else plan.run
        if run != self._run[0]:
            self._run = run, now
        stands = now - self._run[1] > self._patience + plan.seconds
        near = plan.run is not None and (exchange - run) * plan.seconds <= self._patience / 2
        return near or stands or self.found[-1][0] != entry

    def jump(self, exchange: int) -> int:
        """Return the exchange to go on with if the others are far ahead of this island, at ``exchange``; else 0."""
        self._check()
        plan, under_way = self._plan, self._part.config.rounds_under_way
        if plan.run is None or plan.run <= exchange + 2 + under_way:
            return 0
        ahead = min(TIMES.read, self._patience / 2)  # then it waits for them
        self._leapt = plan.run + 1 + math.ceil(ahead / max(plan.seconds, 1e-3))
        return self._leapt

    def close(self) -> None:
        """Publish that this island leaves, and poll no more."""
        self._leaves.set()
        self._thread.join()

    def _check(self) -> None:
        """Raise the error that has ended the thread."""
        if self._failed is not None:
            raise self._failed


def _listens(address: str) -> bool | None:
    """Return whether a process listens at ``address``; ``None``: no answer."""
    try:
        with socket.create_connection(split_address(address, "--rendezvous"), _PROBE) as found:
            return bool(found.getsockname() != found.getpeername())  # a port of this host can connect with itself
    except ConnectionRefusedError:
        return False
    except (OSError, UsageError):
        return None


def _machine() -> str:
    """Return text that only processes of one boot of one machine share, and of one network there; empty: there is none."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/net').stat().st_ino}"
    except OSError:
        return ""
