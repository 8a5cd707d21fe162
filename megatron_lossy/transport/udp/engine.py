"""The engine of this process, its channels, and the exchanges on them."""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import math
import os
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from ...base.errors import UsageError, refuse
from ...base.native import ENGINE
from ...config.transport import UDP_REPORT_BYTES
from ..address import resolve, speed_of
from ..leaving import PeerLost
from ..settings import MIB, Settings
from ..staging import Message
from . import session
from .session import CODES, PHASES, overhead

logger = logging.getLogger(__name__)

SECOND = 1_000_000_000
#: The rules of rates, by their number in the engine.
RULES = {"fixed": 0, "dedicated": 1, "shared": 2}
#: Seconds for ranks to find each other, once all have opened a channel.
PROBE_TIME = 3.0
#: Seconds between looks at signals while waiting.
_SLICE = 0.2
#: ``--udp-deadline auto`` looks back on this many complete times, and needs at least this many.
_HISTORY, _ENOUGH = 100, 20
#: Number of DATA datagrams that may always be on the way, whatever the receiver's buffer.
LEAST_WINDOW = 8

#: A receive buffer below this size, as the kernel counts, is reported to the user; the command allows 4 MiB.
LITTLE_BUFFER, MORE_BUFFER = 8 * MIB, "sysctl -w net.core.rmem_max=4194304"

#: The names of the values of :meth:`Channel.rates`, in the order of the engine.
_RATES = ("rate", "rtt_min", "window", "limit")

#: How often units are sent that hold copies of parameters.
_COPIES = 3
_DEDICATED = "udp: --udp-rate dedicated is for a link of this training's own: others on it get little"

Pointers = Sequence[int | None]


class _Settings(ctypes.Structure):
    _fields_ = [
        ("rate", ctypes.c_double),
        ("reorder", ctypes.c_int64),
        ("peer_timeout", ctypes.c_int64),
        ("eager", ctypes.c_uint64),
        ("memory", ctypes.c_uint64),
        ("instance", ctypes.c_uint64),
        ("packet", ctypes.c_uint32),
        ("cipher", ctypes.c_int),
        ("rule", ctypes.c_int),
        ("flows", ctypes.c_int),
        ("clock", ctypes.c_int64),
    ]


def _declare(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, i, u32, u64, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_uint64, ctypes.c_int64
    text = ctypes.c_char_p
    for name, result, *arguments in (
        ("load_cipher", i),
        ("engine_counter_names", text),
        ("member_counter_names", text),
        ("create", pointer, ctypes.POINTER(_Settings), pointer, u32, i, i, ctypes.POINTER(i64)),
        ("free", None, pointer),
        ("forked", None, pointer),
        ("channel", pointer, pointer, u32, u32, u32, u32, u32, u32),
        ("bucket", None, pointer, i, u32, u64, u32),
        ("code", None, pointer, i, u32, i),
        ("promise", None, pointer, u32, u32),
        ("member", i, pointer, u32, pointer, u32, u64, u32, u32, u64, text, text, i64),
        ("open", None, pointer),
        ("probe", None, pointer, i64),
        ("probed", i, pointer, u32),
        ("linger", i, pointer, i64),
        ("close", None, pointer, i64),
        ("copies", i, pointer, i, u32, pointer, u32, pointer),
        ("post", i, pointer, i, u32, u32, pointer, pointer, i64, i64, ctypes.POINTER(pointer)),
        ("reported", i, pointer, i, u32),
        ("send", i, pointer, i, u32, u32, pointer, pointer, u32, u32, ctypes.POINTER(pointer)),
        ("reports", i, pointer, pointer),
        ("wait", i, pointer, i, i64),
        ("took", i64, pointer),
        ("missing", i, pointer),
        ("release", None, pointer),
        ("failed", i, pointer, ctypes.POINTER(i)),
        ("bears", None, pointer),
        ("lose", None, pointer, u32, i64),
        ("lost", i, pointer, u32),
        ("member_counters", None, pointer, u32, pointer),
        ("engine_counters", None, pointer, pointer),
        ("member_rate", None, pointer, u32, pointer),
    ):
        function = getattr(lib, f"ml_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


@cache
def load() -> ctypes.CDLL:
    """Return the compiled engine."""
    path = ENGINE.path()
    try:
        return _declare(ctypes.CDLL(str(path)))
    except OSError as error:
        raise UsageError(f"--transport udp: {path} cannot be loaded ({error}); remove it to build it again") from None


def pack_address(address: str, port: int) -> bytes:
    """Return a ``struct sockaddr`` of this machine."""
    family, found = resolve(address, port)
    packed = bytes(ctypes.c_uint16(family)) + port.to_bytes(2, "big")
    raw = socket.inet_pton(family, found[0].partition("%")[0])
    if family == socket.AF_INET:
        return packed + raw + bytes(8)
    scope = ctypes.c_uint32(found[3])
    return packed + bytes(4) + raw + bytes(scope)


def charge(datagram: int) -> int:
    """Return bytes of a socket's buffer that the kernel takes for a datagram of Ethernet's size, or a larger one."""
    return 2304 if datagram <= 1500 else (1 << (datagram + 320).bit_length()) + 256


def windows(granted: int, datagram: int, peers: int) -> tuple[int, int]:
    """Return numbers of DATA datagrams that each of ``peers`` may have on the way to a socket with ``granted`` bytes.

    Return two numbers: the one that fits with ease, and the largest one.
    """
    held = granted // charge(datagram) // max(peers, 1)
    return max(held // 3, LEAST_WINDOW), max(held * 9 // 10, LEAST_WINDOW)


class Engine:
    """One socket and one thread. A context manager.

    Args:
        settings: the settings of this process.
        address: the numeric address to send from (:func:`.address.find_address`).
        log: called with lines for the user.
        local_rank: added to ``settings.port``, unless that is 0.
        sharers: processes of this host that share the interface's speed, if no rate is set.
    """

    def __init__(
        self,
        settings: Settings,
        address: str,
        log: Callable[[str], None] = print,
        *,
        local_rank: int = 0,
        sharers: int = 1,
    ) -> None:
        self.settings = settings
        self.address = address
        self.log = log
        self.instance = int.from_bytes(os.urandom(8), "little")
        self.datagram = settings.packet_bytes + overhead(settings.cipher)
        self.rate = settings.rate or speed_of(address) / sharers
        self._channels: list[Channel] = []
        self._lock = threading.RLock()  # guards the promises to senders
        self._lib = load()
        if settings.cipher != "none" and self._lib.ml_load_cipher():
            raise refuse(
                "--transport",
                "udp",
                "needs libcrypto.so.3 or libcrypto.so.1.1: install OpenSSL, or give --udp-key-file none",
            )
        packed = pack_address(address, settings.port + local_rank if settings.port else 0)
        result = (ctypes.c_int64 * 3)()
        # A privileged process gets the buffer that it asks for; other processes get at most net.core.rmem_max.
        self._engine = self._lib.ml_create(
            ctypes.byref(self.c_settings()), packed, len(packed), settings.socket_buffer, 1, result
        )
        if not self._engine:
            raise self._refusal(result[2], settings.port + local_rank)
        atexit.register(self.close, 0.0)  # its thread must not outlive the memory that it reads
        _alive.add(self)
        self.port: int = result[0]
        #: Bytes of the receive buffer, as the kernel counts them.
        self.granted: int = result[1]
        if self.granted < LITTLE_BUFFER:
            log(
                f"udp: the receive buffer of {address}:{self.port} holds {self.granted // charge(self.datagram)} "
                f"datagrams; for 4 MiB: {MORE_BUFFER}"
            )
        if settings.rate_control == "fixed":
            log(f"udp: fixed rate of {self.rate / 1e6:.0f} MB/s, whatever else the network carries")

    def c_settings(self) -> _Settings:
        settings = self.settings
        return _Settings(
            rate=self.rate,
            reorder=-1 if settings.reorder is None else int(settings.reorder * SECOND),
            peer_timeout=int(settings.peer_timeout * SECOND),
            eager=settings.eager_bytes,
            memory=settings.memory,
            instance=self.instance,
            packet=settings.packet_bytes,
            cipher=settings.cipher != "none",
            rule=RULES[settings.rate_control],
            flows=settings.flows,
            clock=time.time_ns() - time.monotonic_ns(),
        )

    def _refusal(self, number: int, port: int) -> Exception:
        if number in (errno.EADDRINUSE, errno.EACCES):
            return refuse("--udp-port", port, f"{os.strerror(number)} on {self.address}")
        if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return refuse("--udp-interface", self.address, f"{os.strerror(number)} on this host")
        return OSError(number, os.strerror(number), "the UDP socket")

    def open(self, *arguments: Any, **options: Any) -> Channel:
        """Open a channel, a collective call of its ranks. The arguments are those of :class:`.Opening`."""
        if self.closed:
            raise RuntimeError(f"the engine of {self.address} is closed, or that of a process that forked this one")
        return Channel(self, session.Opening(*arguments, **options))

    @property
    def closed(self) -> bool:
        """Whether no channel can be opened any more."""
        return not self._engine

    def windows(self, more: int = 0) -> tuple[int, int]:
        """Return :func:`windows` of each process that sends to this one, over all channels and ``more`` processes."""
        return windows(self.granted, self.datagram, len(self.senders) + more)

    @property
    def senders(self) -> set[str]:
        """The processes that send to this one, over all channels, by their instance."""
        return {channel.hellos[peer].instance for channel in self._channels if channel.hellos for peer in channel.peers}

    def promise(self) -> None:
        """Send all senders their share of the buffer, after a channel was opened or closed."""
        with self._lock:
            if self._engine:
                self._lib.ml_promise(self._engine, *self.windows())

    def counters(self) -> dict[str, int]:
        """Return counters of the socket, and of datagrams that belong to no rank; empty for a closed engine."""
        if not self._engine:
            return {}
        names = self._lib.ml_engine_counter_names().decode().rstrip(",").split(",")
        values = (ctypes.c_uint64 * len(names))()
        self._lib.ml_engine_counters(self._engine, values)
        return dict(zip(names, values))

    def close(self, linger: float = 5.0) -> None:
        """Close all channels, and the socket. ``linger``: see :meth:`Channel.close`."""
        for channel in list(self._channels):
            channel.close(linger)
        with self._lock:
            engine, self._engine = self._engine, None
            if engine:
                self._lib.ml_free(engine)
                atexit.unregister(self.close)

    def _forked(self) -> None:
        """Release the engine in a child process: it has no engine thread, and the sockets belong to the parent."""
        atexit.unregister(self.close)
        self._lock = threading.RLock()
        engine, self._engine = self._engine, None
        if engine:
            self._lib.ml_forked(engine)
        for channel in self._channels:
            channel._forked()
        self._channels.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(linger=0.0 if kind else 5.0)


def made(settings: Settings, address: str, local_rank: int) -> Engine:
    """Return the engine of this process, one of those of its host."""
    if settings.rate_control == "dedicated" and not local_rank:
        logger.warning(_DEDICATED)
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Engine(settings, address, logger.warning, local_rank=local_rank, sharers=sharers)


class Channel:
    """The exchanges of a group of ranks, made by :meth:`Engine.open`.

    The phase, step and bucket name an exchange; steps of a bucket rise. ``post`` gives the memory for pieces of others,
    and ``send`` the pieces for others, in any order and from any thread. Buffers must stay where they are, and sent
    ones unchanged, until :meth:`Transfer.wait` and :meth:`Transfer.sent` have returned, or the channel is closed.
    """

    def __init__(self, engine: Engine, opening: session.Opening) -> None:
        assert len(opening.phases) == len(PHASES)
        self._opening = opening
        self.name, self.rank, self.size, self.peers = opening.name, opening.rank, opening.size, opening.others
        self.phases = tuple(opening.phases)
        self._engine = engine
        self._lib = engine._lib
        self._lock = threading.Condition()
        self._users = 0
        self._channel: int | None = None
        self._ends = False  # whether it may not be used any more
        self._closing = threading.RLock()  # of the thread that closes the channel
        self._final: tuple[dict[int, dict[str, int]], dict[int, dict[str, float]]] | None = None  # counters, rates
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
        if opening.bears:
            self._lib.ml_bears(self._channel)
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
            engine._engine, secrets.channel, self.rank, self.size, *counts, engine.settings.packet_bytes
        )
        if not channel:
            raise MemoryError(f"channel {self.name}")
        for index, phase in enumerate(self.phases):
            for bucket, (shard, unit) in enumerate(self._buckets[phase]):
                self._lib.ml_bucket(channel, index, bucket, shard, unit)
                self._lib.ml_code(channel, index, bucket, CODES[self._opening.code(phase)])
                if (phase, bucket) in self._reported and self._lib.ml_reported(channel, index, bucket):
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
        """Send the units of ``mask`` three times at least, and all units ``passes`` times.

        In one pass copies are a third of the message apart; a later pass follows the one before. Raise ``RuntimeError`` while the bucket is being sent.
        """
        units = self._units[phase][bucket]
        mask = np.asarray(mask, np.bool_)
        if mask.shape != (units,):
            raise ValueError(f"a mask of {mask.shape} for {units} units")
        (chosen,) = np.nonzero(mask)
        plain = np.arange(units)
        order = np.concatenate([plain, chosen, chosen])
        places = np.concatenate([plain, (chosen + units // 3) % units, (chosen + 2 * units // 3) % units])
        order = order[np.argsort(places, kind="stable")]
        if passes > 1:
            order = np.concatenate([plain] * passes + [chosen] * (_COPIES - passes))
        order, tags = np.ascontiguousarray(order, np.uint32), np.ascontiguousarray(mask | (passes > 1), np.uint8)
        with self._using():
            result = self._lib.ml_copies(
                self._channel, self.phases.index(phase), bucket, order.ctypes.data, len(order), tags.ctypes.data
            )
        if result:
            raise RuntimeError(
                f"{phase}, bucket {bucket} of {self.name} is being sent" if result == -2 else "no memory"
            )

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
        why = {
            1: f"no datagram for {self._engine.settings.peer_timeout:g} s, process gone or UDP blocked",
            2: "its host refuses datagrams, process gone",
            3: "it has closed the channel, or does without this one",
            4: f"no datagram of {self._engine.datagram:,} bytes comes from it any more, and shorter ones do: the MTU of the path "
            "has fallen; lower --packet-bytes",
            5: "nothing came of it for as long as it was waited for",
        }
        return f"{self._opening.named(rank)} ({self.hellos[rank].where}): {why[reason]}"

    def counters(self) -> dict[int, dict[str, int]]:
        """Return counters of each peer; for a closed channel, those at its end."""
        names = self._lib.ml_member_counter_names().decode().rstrip(",").split(",")
        return self._of_peers(0, names, self._lib.ml_member_counters, ctypes.c_uint64)

    def rates(self) -> dict[int, dict[str, float]]:
        """Return rates towards each peer; for a closed channel, those at its end.

        ``rate``: bytes per second. ``rtt_min``: seconds. ``window``, ``limit``: DATA that the peer's buffer holds for this
        process.
        """
        return self._of_peers(1, _RATES, self._lib.ml_member_rate, ctypes.c_double)

    def _of_peers(self, which: int, names: Sequence[str], read: Any, kind: Any) -> dict[int, dict[str, Any]]:
        with self._lock:  # so that it is not closed in between
            if self._final is not None:
                return self._final[which]
            result = {}
            for peer in self.peers:
                values = (kind * len(names))()
                read(self._channel, peer, values)
                result[peer] = dict(zip(names, values))
            return result

    def close(self, linger: float = 5.0) -> None:
        """Close the channel. Buffers are not touched after this.

        Args:
            linger: seconds to wait until peers have all sent data; they may still be asking for it.
        """
        with self._closing:  # its end is waited for, since the engine may be freed after this
            with self._lock:
                if self._channel is None or self._ends:
                    return
                self._final = self.counters(), self.rates()
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
        self._final = {}, {}
        self._lock, self._closing, self._users, self._channel = threading.Condition(), threading.RLock(), 0, None
        for transfer in self._transfers.values():
            transfer._handle = None
            _of_parent.append(transfer.keep)  # a process without the device cannot give page-locked memory back
        self._transfers.clear()


class Transfer(Message):
    """One exchange, from its first half on."""

    def __init__(self, channel: Channel, key: tuple[int, int, int]) -> None:
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
        """Return whether the engine reads nothing from the sources any more. Raise :class:`PeerLost`."""
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


#: Engines of this process; and in a child, the objects that the engines of its parent keep.
_alive: weakref.WeakSet[Engine] = weakref.WeakSet()
_of_parent: list[object] = []


def _after_fork_in_child() -> None:
    for engine in list(_alive):
        engine._forked()


os.register_at_fork(after_in_child=_after_fork_in_child)
