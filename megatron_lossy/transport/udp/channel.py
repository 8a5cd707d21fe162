"""The exchanges of a group of ranks over datagrams, and one of them."""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ...config.transport import UDP_REPORT_BYTES
from ..leaving import PeerLost
from ..staging import Message
from . import session
from .library import REASONS, SECOND, pack_address
from .repeats import order_of_copies
from .session import CODES, PHASES

#: Seconds for ranks to find each other, once all have opened a channel.
PROBE_TIME = 3.0
#: Seconds between looks at signals while waiting.
_SLICE = 0.2
#: ``--udp-deadline auto`` looks back on this many complete times, and needs at least this many.
_HISTORY, _ENOUGH = 100, 20
#: The names of the values of :meth:`Channel.rates`, in the order of the engine.
_RATES = ("rate", "rtt_min", "window", "limit")

Pointers = Sequence[int | None]
#: In a child process, the memory of its parent's exchanges.
_of_parent: list[object] = []


class Channel:
    """The exchanges of a group of ranks, made by :meth:`Engine.open`.

    The phase, step and bucket name an exchange; steps of a bucket rise. ``post`` gives the memory for pieces of others,
    and ``send`` the pieces for others, in any order and from any thread. Buffers must stay where they are, and sent
    ones unchanged, until :meth:`Transfer.wait` and :meth:`Transfer.sent` have returned, or the channel is closed.
    """

    def __init__(self, engine: Any, opening: session.Opening) -> None:
        assert len(opening.phases) == len(PHASES)
        self._opening = opening
        self.name, self.rank, self.size, self.peers = opening.name, opening.rank, opening.size, opening.others
        self.phases = tuple(opening.phases)
        self._engine, self._lib = engine, engine._lib
        self._lock = threading.Condition()
        self._users = 0
        self._channel: int | None = None
        self._ends = False  # whether it may not be used any more
        self._closing = threading.RLock()  # of the thread that closes the channel
        self._final: dict[int, tuple[dict[str, int], dict[str, float]]] | None = None  # counters and rates at the end
        self._transfers: dict[tuple[int, int, int], Transfer] = {}
        self._took: dict[tuple[int, int], deque[float]] = {}
        self._buckets = {phase: list(opening.cut(phase)) for phase in self.phases}
        self._units = {phase: [-(-shard // unit) for shard, unit in cut] for phase, cut in self._buckets.items()}
        settings = engine.settings
        for phase in self.phases:
            for number, (shard, unit) in enumerate(self._buckets[phase]):
                if not (shard > 0 and 0 < unit <= settings.packet_bytes):
                    raise ValueError(f"bucket {number} of {phase}: {unit} of {shard} bytes in a datagram")
        every = ((phase, number) for phase in self.phases for number in range(len(self._buckets[phase])))
        self._reported = frozenset(key for key in every if key in opening.reported or key[0] in opening.reported)
        if self._reported and settings.packet_bytes < UDP_REPORT_BYTES:
            raise ValueError(f"reports need packets of {UDP_REPORT_BYTES} bytes at least, not {settings.packet_bytes}")
        #: The hellos of all ranks, once all have come.
        self.hellos: list[session.Hello] = []
        window, limit = engine.windows(len(self.peers))  # some peers may be counted twice; REPORTs correct the window
        self.hellos = session.meet(
            "udp", engine, opening, session.PROTOCOL,
            packet_bytes=settings.packet_bytes, instance=f"{engine.instance:016x}", window=window, limit=limit,
            eager=min(settings.eager_bytes, settings.memory // (4 * max(len(self.peers), 1))),
        )  # fmt: skip
        number = session.channel_id(bytes.fromhex(self.hellos[0].random), self.name)
        secrets = session.Secrets(self.name, number, self.hellos, settings.key)
        self._channel = self._create(secrets)
        with engine._lock:
            engine._channels.append(self)
            engine.promise()
        self._lib.ml_open(self._channel)
        try:
            secrets.check(opening.share("opened", secrets.proof(self.rank)))
            self._reach()
        except BaseException:
            self.close(linger=0.0)
            raise

    def _create(self, secrets: session.Secrets) -> int:
        engine = self._engine
        counts = [len(self._buckets[phase]) for phase in self.phases]
        channel = self._lib.ml_channel(
            engine._engine, secrets.channel, self.rank, self.size, *counts, self._opening.bears
        )
        if not channel:
            raise MemoryError(f"channel {self.name}")
        for index, phase in enumerate(self.phases):
            for bucket, (shard, unit) in enumerate(self._buckets[phase]):
                more = CODES[self._opening.code(phase)], (phase, bucket) in self._reported
                if self._lib.ml_bucket(channel, index, bucket, shard, unit, *more):
                    self._lib.ml_close(channel, -1)
                    raise MemoryError(f"reports of channel {self.name}")
        for peer in self.peers:
            hello = self.hellos[peer]
            packed = pack_address(hello.address, hello.port)
            keys = secrets.key(self.rank, peer), secrets.key(peer, self.rank)
            where = (packed, len(packed), int(hello.instance, 16))
            if self._lib.ml_member(channel, peer, *where, hello.window, hello.limit, hello.eager, *keys, -1):
                self._lib.ml_close(channel, -1)
                raise MemoryError(f"rank {peer} of channel {self.name}")
        return channel

    def _reach(self) -> None:
        """Exchange datagrams of full size with every peer."""
        until = time.monotonic() + PROBE_TIME
        self._lib.ml_probe(self._channel, time.monotonic_ns() + int(2 * PROBE_TIME * SECOND))
        while time.monotonic() < until and any(self._lib.ml_probed(self._channel, peer) != 3 for peer in self.peers):
            time.sleep(0.001)
        heard = [r not in self.peers or bool(self._lib.ml_probed(self._channel, r) & 1) for r in range(self.size)]
        rows = self._opening.share("heard", bytes(heard))
        session.check_reached(self.name, self.hellos, [[bool(x) for x in row] for row in rows], self._engine.datagram)

    @contextmanager
    def _using(self, transfer: Transfer | None = None) -> Iterator[None]:
        """Return a context in which the channel is not closed, and ``transfer`` keeps its handle."""
        with self._lock:
            if self._channel is None or self._ends:
                raise RuntimeError(f"channel {self.name} is closed")
            self._users += 1
            if transfer is not None:
                transfer._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if transfer is not None:
                    transfer._users -= 1
                    transfer._release()
                self._lock.notify_all()

    def _pointers(self, pointers: Pointers) -> ctypes.Array:
        if len(pointers) != self.size:
            raise ValueError(f"{len(pointers)} pointers for {self.size} ranks")
        return (ctypes.c_void_p * self.size)(*pointers)

    def _key(self, phase: str, step: int, bucket: int) -> tuple[int, int, int]:
        if not 0 <= bucket < len(self._units[phase]):
            raise ValueError(f"{phase} has {len(self._units[phase])} buckets, not a bucket {bucket}")
        return self.phases.index(phase), bucket, step % 2**32

    def _half(self, key: tuple[int, int, int], result: int, handle: ctypes.c_void_p) -> Transfer:
        """Return the transfer of ``key`` after one of its halves has begun. Called with the lock."""
        if result:
            if result == -1:
                raise self.lost()
            where = f"{self.phases[key[0]]} {key[2]}, bucket {key[1]} of {self.name}"
            raise ValueError(f"{where}: not later than its last step") if result == -2 else MemoryError(where)
        # Without this, halves would stay for ever in a channel that only sends, or is never asked about sent data.
        for old in [old for old in self._transfers if old[:2] == key[:2] and 0 < (key[2] - old[2]) % 2**32 < 2**31]:
            self._transfers[old]._forget()
        transfer = self._transfers.setdefault(key, Transfer(self, key))
        if transfer._handle is None:
            transfer._handle = handle
        else:
            self._lib.ml_release(handle)
        return transfer

    def post(
        self, phase: str, step: int, bucket: int, destinations: Pointers, *, within: float | None = None
    ) -> Transfer:
        """Give the address for the piece of each source; ``None`` for this rank and for sources that send nothing.

        ``within``: seconds that this exchange may take, or infinity, in the place of ``--udp-deadline``.
        """
        key, pointers = self._key(phase, step, bucket), self._pointers(destinations)
        arrived = np.zeros((self.size, self._units[phase][bucket]), np.bool_)
        seconds = self._deadline(key[:2]) if within is None else within
        deadline = 0 if seconds == math.inf else int(seconds * SECOND)
        handle = ctypes.c_void_p()
        with self._using(), self._lock:
            result = self._lib.ml_post(
                self._channel, key[0], key[2], bucket, pointers, arrived.ctypes.data, deadline, -1, ctypes.byref(handle)
            )
            transfer = self._half(key, result, handle)
            transfer.arrived = arrived
            return transfer

    def send(
        self,
        phase: str,
        step: int,
        bucket: int,
        sources: Pointers,
        must: np.ndarray | None = None,
        copies: tuple[int, int] = (1, 0),
    ) -> Transfer:
        """Give the address of each destination's piece; ``None`` for this rank and for destinations that get nothing.

        ``must`` bool[N, units], in a reported phase: the units that must arrive at each destination. Of each
        ``copies[0]`` such units ``copies[1]`` are sent again behind the message.
        """
        key, pointers = self._key(phase, step, bucket), self._pointers(sources)
        if must is not None:
            must = np.ascontiguousarray(must, np.bool_)
            if (phase, bucket) not in self._reported or must.shape != (self.size, self._units[phase][bucket]):
                raise ValueError(f"must {must.shape} for {phase}, bucket {bucket} of {self.name}")
        handle = ctypes.c_void_p()
        with self._using(), self._lock:
            result = self._lib.ml_send(
                self._channel, key[0], key[2], bucket, pointers,
                None if must is None else must.ctypes.data, *copies, ctypes.byref(handle),
            )  # fmt: skip
            transfer = self._half(key, result, handle)
            transfer._sending = True
            return transfer

    def copies(self, phase: str, bucket: int, mask: np.ndarray, passes: int = 1) -> None:
        """Send the units of ``mask`` three times at least, and all units ``passes`` times: see :func:`.order_of_copies`.

        Raise ``RuntimeError`` while the bucket is being sent.
        """
        units = self._units[phase][bucket]
        mask = np.asarray(mask, np.bool_)
        if mask.shape != (units,):
            raise ValueError(f"a mask of {mask.shape} for {units} units")
        order, tags = order_of_copies(mask, passes), np.ascontiguousarray(mask | (passes > 1), np.uint8)
        with self._using():
            result = self._lib.ml_copies(
                self._channel, self.phases.index(phase), bucket, order.ctypes.data, len(order), tags.ctypes.data
            )
        if result:
            why = "is being sent" if result == -2 else "has no memory for copies"
            raise RuntimeError(f"{phase}, bucket {bucket} of {self.name} {why}")

    def _deadline(self, key: tuple[int, int]) -> float:
        deadline = self._engine.settings.deadline
        if deadline != "auto":
            return deadline or 0.0
        took = self._took.get(key, ())
        return 1.2 * float(np.quantile(took, 0.95)) if len(took) >= _ENOUGH else 0.0

    def lost(self) -> PeerLost:
        """Return an error that names the rank that is gone, if the engine has it."""
        culprit = ctypes.c_int()
        reason = self._lib.ml_failed(self._channel, ctypes.byref(culprit))
        return PeerLost(self._without(culprit.value, reason))

    def lose(self, rank: int) -> None:
        """Do without ``rank`` from now on, in a channel that bears that: what was to come from it is lost."""
        with self._using():
            self._lib.ml_lose(self._channel, rank, -1)

    def lost_ranks(self) -> dict[int, str]:
        """Return the ranks that are done without, and why."""
        with self._using():
            reasons = {rank: self._lib.ml_lost(self._channel, rank) for rank in self.peers}
        return {rank: self._without(rank, reason) for rank, reason in reasons.items() if reason}

    def _without(self, rank: int, reason: int) -> str:
        why = REASONS[reason].format(self._engine.settings.peer_timeout, self._engine.datagram)
        return f"{self._opening.named(rank)} ({self.hellos[rank].where}): {why}"

    def counters(self) -> dict[int, dict[str, int]]:
        """Return counters of each peer; for a closed channel, those at its end."""
        return {peer: counts for peer, (counts, _) in self._of_peers().items()}

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards each peer; for a closed channel, those at its end.

        ``rate``: bytes per second. ``rtt_min``: seconds. ``window``, ``limit``: DATA that the peer's buffer holds for this
        process.
        """
        return {peer: rates for peer, (_, rates) in self._of_peers().items()}

    def _of_peers(self) -> dict[int, tuple[dict[str, int], dict[str, float]]]:
        with self._lock:  # so that it is not closed in between
            if self._final is not None:
                return self._final
            names, found = self._lib.ml_member_counter_names().decode().rstrip(",").split(","), {}
            for peer in self.peers:
                counts, rates = (ctypes.c_uint64 * len(names))(), (ctypes.c_double * len(_RATES))()
                self._lib.ml_member_counters(self._channel, peer, counts, rates)
                found[peer] = dict(zip(names, counts)), dict(zip(_RATES, rates))
            return found

    def close(self, linger: float = 5.0) -> None:
        """Close the channel. Buffers are not touched after this.

        Args:
            linger: seconds to wait until peers have all sent data; they may still be asking for it.
        """
        with self._closing:  # its end is waited for, since the engine may be freed after this
            with self._lock:
                if self._channel is None or self._ends:
                    return
                self._final = self._of_peers()
                self._ends = True
                while self._users:
                    self._lock.wait()
                channel, self._channel = self._channel, None
            if linger > 0:
                self._lib.ml_linger(channel, int(linger * SECOND))
            self._lib.ml_close(channel, -1)
            for transfer in list(self._transfers.values()):  # it reads and writes nothing any more
                transfer._ended()
            self._transfers.clear()
            with self._engine._lock:
                if self in self._engine._channels:
                    self._engine._channels.remove(self)
            self._engine.promise()

    def _forked(self) -> None:
        """Reset the channel in a child process, where no thread holds the lock."""
        self._final = {}
        self._lock, self._closing, self._users, self._channel = threading.Condition(), threading.RLock(), 0, None
        for transfer in self._transfers.values():
            transfer._handle = None
            _of_parent.append(transfer.keep)  # a process without the device cannot give page-locked memory back
        self._transfers.clear()


class Transfer(Message):
    """One exchange, from its first half on."""

    def __init__(self, channel: Any, key: tuple[int, int, int]) -> None:
        self.key = key
        self.arrived: np.ndarray | None = None
        #: Owns the memory that the engine reads and writes. It is kept for as long as that takes, even without a wait.
        self.keep: object = None
        #: Seconds from the posting to the end.
        self.took: float | None = None
        self._channel = channel
        self._lib = channel._lib
        self._handle: ctypes.c_void_p | None = None
        self._users, self._dropped = 0, False
        self._sending = self._all_sent = False
        self._reports = False  # whether reports are still wanted

    def __str__(self) -> str:
        phase, bucket, step = self.key
        return f"{self._channel.phases[phase]} {step}, bucket {bucket} of {self._channel.name}"

    def _drop(self) -> None:
        """Drop the transfer: the engine will not be asked for it. Called with the channel's lock."""
        self._channel._transfers.pop(self.key, None)
        self._dropped = True
        self._release()

    def _release(self) -> None:
        """Give the handle back, if it was dropped and is not in use. Called with the channel's lock."""
        if self._dropped and not self._users and self._handle is not None:
            self._lib.ml_release(self._handle)
            self._ended()

    def _ended(self) -> None:
        self._handle = self.keep = None

    def _forget(self) -> None:
        """Drop the transfer if it is over, because a later step has begun. Called with the channel's lock."""
        if self._handle is not None and self._sending and not self._all_sent:
            self._all_sent = self._lib.ml_wait(self._handle, 1, 0) == 0
        over = self.arrived is None or self.took is not None
        if self._handle is not None and over and (not self._sending or self._all_sent) and not self._reports:
            self._drop()

    def wait(self, timeout: float | None = None) -> np.ndarray:
        """Return bool[N, units]: arrived units. The own row is true; that of a source without destination is false.

        Waits also until the exchange is posted, but not for the data that this rank sends. Raise :class:`PeerLost`, or
        TimeoutError after ``timeout`` seconds; the engine may then still write.
        """
        if not self._wait(0, timeout):
            raise TimeoutError(f"{self}: {self._missing()} after {timeout:g} s")
        return self.arrived

    def all_sent(self) -> bool:
        return self._wait(1, 0.0)

    def sent(self, timeout: float | None = None) -> None:
        """Wait until the engine reads nothing from the sources any more, and also until ``send`` is called."""
        if not self._wait(1, timeout):
            raise TimeoutError(f"{self}: not all sent after {timeout:g} s")

    def expects_reports(self, wanted: bool = True) -> None:
        """Announce that :meth:`reports` will be called. Call this before the data is sent."""
        self._reports = wanted

    def reports(self) -> np.ndarray | None:
        """Return bool[N, units]: the lost units, in a reported phase; ``None`` while a report is missing.

        Raise :class:`PeerLost`. After :meth:`expects_reports`, call this until it returns the array.
        """
        channel = self._channel
        phase, bucket, _ = self.key
        lost = np.empty((channel.size, channel._units[channel.phases[phase]][bucket]), np.bool_)
        with channel._using(self):
            if not self._reports or self._handle is None:
                raise ValueError(f"{self}: no reports are left")
            result = self._lib.ml_reports(self._handle, lost.ctypes.data)
            if result < 0:
                raise channel.lost()
            if result:
                return None
            with channel._lock:
                self._reports = False
                self._forget()
        return lost

    def _missing(self) -> str:
        channel = self._channel
        with channel._using(self):
            rank = -1 if self._handle is None else self._lib.ml_missing(self._handle)
        if rank < 0:
            return "not posted"
        return f"waits for rank {channel._opening.number(rank)} ({channel.hellos[rank].where})"

    def _wait(self, what: int, timeout: float | None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not (self._all_sent if what else self.took is not None):
            rest = _SLICE if until is None else min(max(until - time.monotonic(), 0.0), _SLICE)
            with self._channel._using(self):
                if self._all_sent if what else self.took is not None:
                    break  # another thread has seen it
                if self._handle is None:
                    raise ValueError(f"{self}: its other half never began")
                result = self._lib.ml_wait(self._handle, what, int(rest * SECOND))
                if result < 0:
                    raise self._channel.lost()
                if result == 0:
                    self._note(what)
            if result and until is not None and time.monotonic() >= until:
                return False
        return True

    def _note(self, what: int) -> None:
        """Note that the exchange is over (``what`` 0), or that all is sent (1)."""
        channel = self._channel
        with channel._lock:
            if what:
                self._all_sent = True
            elif self.took is None:
                self.took = self._lib.ml_took(self._handle) / SECOND
                channel._took.setdefault(self.key[:2], deque(maxlen=_HISTORY)).append(self.took)
            if self.took is not None and self._all_sent and not self._reports:
                self._drop()
