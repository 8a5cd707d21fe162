"""Engines without sockets, threads or a clock, joined by a function that says when each datagram arrives."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import heapq
import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megatron_lossy.base.native import ENGINE
from megatron_lossy.transport.udp.library import RULES, SECOND, CSettings, declare, pack_address
from tests import udp_packet as packet

MS = SECOND // 1000
CHANNEL = 0x01020304
VERDICTS = ("taken", "malformed", "foreign", "bad tag", "duplicate", "late", "early", "early dropped")


class _Output(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_uint8 * 128),
        ("to_size", ctypes.c_uint32),
        ("bytes", ctypes.c_uint32),
        ("segment", ctypes.c_uint32),
    ]


#: The engine with functions that need no socket and no thread; named by its own sources, too.
HOOKED = dataclasses.replace(
    ENGINE,
    name="hooked",
    source=Path(__file__).with_name("udp_hooks.c"),
    options=(*ENGINE.options, f"-DENGINE={ENGINE.shipped().stem}"),
)


def declared(path: Path) -> ctypes.CDLL:
    """Return the library of :data:`HOOKED` in ``path``."""
    lib = declare(ctypes.CDLL(str(path)))
    pointer, i, i64, double = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_double
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    for name, result, *arguments in (
        ("handle", i, pointer, pointer, pointer, ctypes.c_size_t, i64),
        ("produce", i, pointer, i64, pointer, pointer),
        ("timers", None, pointer, i64),
        ("due", i64, pointer),
        ("rate_new", pointer, double, double, i, double, double),
        ("rate_free", None, pointer),
        ("rate_sample", None, pointer, i64, i64),
        ("rate_report", None, pointer, i64, u64, u64, u64, u32, i64, double),
        ("rate_look", None, pointer, i64, i64),
        ("rate_shared", None, pointer, pointer),
        ("rate_get", None, pointer, pointer),
    ):
        function = getattr(lib, f"ml_{name}")
        function.restype, function.argtypes = result, arguments
    return lib


@functools.cache
def load() -> ctypes.CDLL:
    """Return the engine with its hooks for tests."""
    return declared(HOOKED.path())


@functools.cache
def address(rank: int) -> bytes:
    return pack_address("127.0.0.1", 1000 + rank)


@dataclass
class Exchange:
    """One rank's half: what it got, and when it was over."""

    arrived: np.ndarray
    pieces: np.ndarray
    handle: ctypes.c_void_p
    posted_at: int
    over_at: int | None = None


@dataclass
class Node:
    """A rank of one channel."""

    rank: int
    size: int
    buckets: dict[str, list[tuple[int, int]]]
    packet: int = 64
    cipher: bool = False
    eager: int = 1 << 20
    memory: int = 1 << 28
    window: int = 1000
    rate: float = 1e9
    reorder: int = MS
    peer_timeout: int = 30 * SECOND
    rule: str = "fixed"
    key: bytes = bytes(16)
    bears: bool = False
    reported: tuple[str, ...] = ()
    exchanges: dict[tuple[str, int, int], Exchange] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lib = load()
        if self.cipher:
            assert not self.lib.ml_load_cipher()
        settings = CSettings(
            rate=self.rate,
            reorder=self.reorder,
            peer_timeout=self.peer_timeout,
            eager=self.eager,
            memory=self.memory,
            packet=self.packet,
            cipher=self.cipher,
            rule=RULES[self.rule],
        )
        self.engine = self.lib.ml_create(ctypes.byref(settings), None, 0, 0, (ctypes.c_int64 * 3)())
        self.lib.ml_promise(self.engine, self.window, self.window)
        counts = [len(self.buckets.get(phase, ())) for phase in packet.PHASES]
        self.channel = self.lib.ml_channel(self.engine, CHANNEL, self.rank, self.size, *counts, self.bears)
        for number, phase in enumerate(packet.PHASES):
            for bucket, (shard, unit) in enumerate(self.buckets.get(phase, ())):
                assert not self.lib.ml_bucket(self.channel, number, bucket, shard, unit, 0, phase in self.reported)
        for peer in range(self.size):
            if peer != self.rank:
                where = address(peer)
                windows = (self.window, self.window)
                assert not self.lib.ml_member(
                    self.channel, peer, where, len(where), peer, *windows, self.eager, self.key, self.key, 0
                )
        self.lib.ml_open(self.channel)
        self._out = (ctypes.c_uint8 * (1 << 18))()
        self._output = _Output()

    def close(self) -> None:
        if self.engine:
            self.lib.ml_close(self.channel, 0)
            self.lib.ml_free(self.engine)
            self.engine = None

    def units(self, phase: str, bucket: int) -> int:
        shard, unit = self.buckets[phase][bucket]
        return -(-shard // unit)

    def post(self, now: int, phase: str, step: int, bucket: int, sources=None, deadline: int = 0) -> Exchange:
        sources = [r for r in range(self.size) if r != self.rank] if sources is None else sources
        shard, _ = self.buckets[phase][bucket]
        guard = 64
        pieces = np.full((self.size, shard + guard), 0xEE, np.uint8)
        arrived = np.zeros((self.size, self.units(phase, bucket)), np.bool_)
        pointers = [pieces[r].ctypes.data if r in sources else None for r in range(self.size)]
        handle = ctypes.c_void_p()
        result = self.lib.ml_post(
            self.channel, packet.PHASES.index(phase), step, bucket, (ctypes.c_void_p * self.size)(*pointers),
            arrived.ctypes.data, deadline, now, ctypes.byref(handle),
        )  # fmt: skip
        assert result == 0, result
        exchange = Exchange(arrived, pieces, handle, now)
        self.exchanges[phase, step, bucket] = exchange
        self.look(now)
        return exchange

    def send(
        self,
        phase: str,
        step: int,
        bucket: int,
        data: np.ndarray,
        must: np.ndarray | None = None,
        code=(1, 0),
        to: Collection[int] | None = None,
    ) -> ctypes.c_void_p:
        """``data``: uint8[size, shard], which must stay alive; ``must`` bool[size, units].

        ``to``: the ranks that get something; ``None``: all others.
        """
        others = set(range(self.size)) - {self.rank} if to is None else to
        pointers = [data[r].ctypes.data if r in others else None for r in range(self.size)]
        handle = ctypes.c_void_p()
        sources = (ctypes.c_void_p * self.size)(*pointers)
        must = None if must is None else np.ascontiguousarray(must, np.bool_)
        result = self.lib.ml_send(
            self.channel, packet.PHASES.index(phase), step, bucket, sources, None if must is None else must.ctypes.data, *code,
            ctypes.byref(handle),
        )  # fmt: skip
        assert result == 0, result
        return handle

    def reports(self, handle: ctypes.c_void_p, phase: str, bucket: int) -> np.ndarray | None:
        lost = np.empty((self.size, self.units(phase, bucket)), np.bool_)
        return None if self.lib.ml_reports(handle, lost.ctypes.data) else lost

    def handle(self, now: int, source: int, datagram: bytes) -> str:
        """Return ``source``: the number of an address; ranks begin with their own."""
        verdict = VERDICTS[self.lib.ml_handle(self.engine, address(source), datagram, len(datagram), now)]
        self.look(now)
        return verdict

    def timers(self, now: int) -> None:
        self.lib.ml_timers(self.engine, now)
        self.look(now)

    def produce(self, now: int) -> tuple[int, list[bytes]] | None:
        """Return destination and datagrams of the next batch."""
        if not self.lib.ml_produce(self.engine, now, self._out, ctypes.byref(self._output)):
            return None
        port = int.from_bytes(bytes(self._output.to[2:4]), "big")
        whole = ctypes.string_at(self._out, self._output.bytes)
        segment = self._output.segment
        return port - 1000, [whole[i : i + segment] for i in range(0, len(whole), segment)]

    def produce_all(self, now: int) -> list[tuple[int, bytes]]:
        result = []
        while batch := self.produce(now):
            result += [(batch[0], datagram) for datagram in batch[1]]
        return result

    def due(self) -> int:
        return self.lib.ml_due(self.engine)

    def look(self, now: int) -> None:
        for exchange in self.exchanges.values():
            if exchange.over_at is None and self.lib.ml_wait(exchange.handle, 0, 0) == 0:
                exchange.over_at = now

    def counters(self, peer: int) -> dict[str, int]:
        names = self.lib.ml_member_counter_names().decode().rstrip(",").split(",")
        values = (ctypes.c_uint64 * len(names))()
        self.lib.ml_member_counters(self.channel, peer, values, (ctypes.c_double * 4)())
        return dict(zip(names, values))

    def engine_counters(self) -> dict[str, int]:
        names = self.lib.ml_engine_counter_names().decode().rstrip(",").split(",")
        values = (ctypes.c_uint64 * len(names))()
        self.lib.ml_engine_counters(self.engine, values)
        return dict(zip(names, values))

    def failed(self) -> tuple[int, int]:
        """Return reason and culprit; (0, 0) if it has not."""
        culprit = ctypes.c_int()
        return self.lib.ml_failed(self.channel, ctypes.byref(culprit)), culprit.value

    def released(self, key) -> None:
        """Nobody asks for this exchange any more."""
        self.lib.ml_release(self.exchanges.pop(key).handle)


def send_only(channel, phase: str, bucket: int, units: np.ndarray) -> None:
    """Let a real channel leave out all but ``units`` bool[units], unless it is asked for the others."""
    order, tags = np.flatnonzero(units).astype(np.uint32), np.zeros(len(units), np.uint8)
    place = channel._channel, channel.phases.index(phase), bucket
    channel._lib.ml_copies(*place, order.ctypes.data, len(order), tags.ctypes.data)


def fields_of(datagram: bytes) -> tuple[int, dict[str, int]]:
    _, kind, fields, _ = packet.decode(datagram)
    return kind, fields


class World(contextlib.AbstractContextManager):
    """Nodes and the network between them; ``now`` jumps to what happens next.

    ``link(source, destination, datagram, now)``: the times at which copies of it arrive; none if it is lost.
    """

    def __init__(self, size: int, buckets, link=None, nodes=None, **settings) -> None:
        self.nodes = nodes or [Node(rank, size, buckets, **settings) for rank in range(size)]
        self.link = link or (lambda source, destination, datagram, now: [now + MS])
        self.now = SECOND
        self.stopped: set[int] = set()
        self.on_the_way: list = []
        self._count = itertools.count()

    def __exit__(self, *_: object) -> None:
        for node in self.nodes:
            node.close()

    def turn(self) -> None:
        """Everything that is due now, then on to the next time at which something is."""
        for node in self.nodes:
            if node.rank in self.stopped:
                continue
            node.timers(self.now)
            for destination, datagram in node.produce_all(self.now):
                for at in self.link(node.rank, destination, datagram, self.now):
                    heapq.heappush(self.on_the_way, (at, next(self._count), node.rank, destination, datagram))
        times = [node.due() for node in self.nodes if node.rank not in self.stopped]
        if self.on_the_way:
            times.append(self.on_the_way[0][0])
        self.now = max(self.now + 1, min(times))
        while self.on_the_way and self.on_the_way[0][0] <= self.now:
            _, _, source, destination, datagram = heapq.heappop(self.on_the_way)
            self.nodes[destination].handle(self.now, source, datagram)

    def run(self, until, limit: int = 20 * SECOND) -> None:
        """Until ``until()``; fails if that takes more than ``limit`` of the world's time."""
        end = self.now + limit
        while not until():
            assert self.now < end, f"still not after {limit / SECOND} s"
            self.turn()

    def run_for(self, time: int) -> None:
        end = self.now + time
        self.run(lambda: self.now >= end, time + SECOND)
