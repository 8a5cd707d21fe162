"""``--packet-bytes auto``: the largest packets that the paths between all hosts carry, found before the run.

One rank of each host sends datagrams of rising lengths to one of each other host, which says what came (RFC 8899). All
ranks take the longest that came on every path. A path on which nothing came has no say: the channels, which are tried
with full packets when they are opened, name it. So they do where what was found does not hold.

Nothing here is secret or authentic. Whoever forges an answer can make packets shorter, or keep the run from beginning.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...base.device.attempt import attempt_store
from ...base.errors import refuse
from ...config import LossyConfig
from ...config.transport import UDP_PACKET_BYTES, UDP_PACKETS
from .address import find_address, mtu_of, resolve
from .packet import overhead

logger = logging.getLogger(__name__)

#: MTUs of networks and tunnels, in bytes.
MTUS = (576, 1024, 1280, 1350, 1400, 1420, 1450, 1500, 2048, 3072, 4096, 4470, 6144, 8192, 8896, 8950, 9000)
#: Packets are a multiple of so many bytes.
STEP = 64
#: Seconds: between attempts; after which what is longer than the longest that came does not pass; without any answer.
AGAIN, ENOUGH, PATIENCE = 0.05, 1.0, 3.0
#: A number of this meeting, the rank that sends, whether it is an answer, and its longest packet that came, if so.
_HEADER = struct.Struct("<8sI?I")
_LONGEST = 65_535
#: Options that say whether routers may cut datagrams, and the value for never, whatever the kernel knows of the path.
_DISCOVERY, _PROBE = {socket.AF_INET: (socket.IPPROTO_IP, 10), socket.AF_INET6: (socket.IPPROTO_IPV6, 23)}, 3
_TIMEOUT = timedelta(minutes=10)
#: What may pass between the first rank and the last, once all have found each other.
_TOGETHER = timedelta(seconds=60)

_agreed: dict[tuple[Any, ...], int] = {}
_stores: list[Any] = []  # whose servers other ranks may still read


def agreed(config: LossyConfig) -> int:
    """The number for ``--packet-bytes auto``. A collective call of all ranks, before there is a process group or later.

    What was found holds for the whole process.
    """
    key = config.udp_interface, config.udp_port, config.udp_cipher
    if key not in _agreed:
        _agreed[key] = _agree(config)
    return _agreed[key]


def _agree(config: LossyConfig) -> int:
    """Return the most bytes of a packet that come on all paths."""
    address = find_address(config.udp_interface, os.environ.get("MASTER_ADDR", "127.0.0.1"))
    store, prefix, rank, size = _meeting()
    with _socket(config, address) as own:
        place = {
            "address": address,
            "port": own.getsockname()[1],
            "mtu": mtu_of(address) or 1500,
            "drawn": os.urandom(8).hex(),
        }
        store.set(f"{prefix}/place/{rank}", json.dumps(place))
        keys = [f"{prefix}/place/{other}" for other in range(size)]
        try:
            store.wait(keys, _TOGETHER)
        except dist.DistStoreError:
            why = f"not all ranks came to agree within {_TOGETHER.seconds} s: all must have it, or the same number"
            raise refuse("--packet-bytes", "auto", why) from None
        places = [json.loads(store.get(key)) for key in keys]
        mtu = min(one["mtu"] for one in places)
        lengths = candidates(mtu, overhead(config.udp_cipher) + (48 if ":" in address else 28))
        first: dict[str, int] = {}
        for other, one in enumerate(places):
            first.setdefault(one["address"], other)
        results = {other: f"{prefix}/passed/{other}" for other in first.values()}
        if first[address] == rank:
            others = {other: places[other] for other in results if other != rank}
            probe = _Probe(own, rank, others, lengths, overhead(config.udp_cipher), bytes.fromhex(places[0]["drawn"]))
            probe.run(
                lambda found: store.set(results[rank], json.dumps(found)), lambda: store.check([*results.values()])
            )
        found = {other: json.loads(store.get(key)) for other, key in results.items()}
    ways = {(source, int(to)): most for source, row in found.items() for to, most in row.items()}
    taken, worst = choose(lengths, ways)
    if rank == 0:
        why = f"the least MTU of the interfaces is {mtu:,}"
        if worst is not None:
            source, to = (places[end]["address"] for end in worst)
            why = f"longer ones do not come from {source} to {to}; {why}"
        logger.warning("udp: --packet-bytes auto takes %d: %s", taken, why)
    return taken


def _meeting() -> tuple[Any, str, int, int]:
    """A store of all ranks, a prefix of keys that are in it for the first time, the rank, and the number of ranks."""
    if dist.is_initialized():
        drawn = [os.urandom(8).hex()]  # keeps keys of dead ranks out
        dist.broadcast_object_list(drawn, 0)
        store = dist.distributed_c10d._get_default_store()
        return store, f"megatron_lossy/packets/{drawn[0]}", dist.get_rank(), dist.get_world_size()
    if "RANK" not in os.environ:
        return dist.HashStore(), "", 0, 1
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    _stores.append(attempt_store(rank, size, _TIMEOUT))
    return _stores[-1], f"megatron_lossy/packets/{len(_agreed)}", rank, size


def candidates(mtu: int, headers: int) -> list[int]:
    """The lengths of packets to try, rising, where interfaces take packets of ``mtu`` bytes with ``headers``."""
    least, most = UDP_PACKETS
    top = min(max((mtu - headers) // STEP * STEP, least), most)
    return sorted({top, *(n for one in MTUS if least <= (n := (one - headers) // STEP * STEP) < top)})


def choose(lengths: Sequence[int], ways: Mapping[tuple[int, int], int]) -> tuple[int, tuple[int, int] | None]:
    """The longest of ``lengths`` that came on all ``ways``, and a way on which no longer one came, if there is one.

    0: nothing came on that way, which has no say. Where nothing came at all it is the default, or what is shorter.
    """
    known = {way: most for way, most in ways.items() if most}
    if ways and not known:
        return max((n for n in lengths if n <= UDP_PACKET_BYTES), default=lengths[0]), None
    worst = min(known, key=lambda way: (known[way], way), default=None)
    if worst is None or known[worst] == lengths[-1]:
        return lengths[-1], None
    return known[worst], worst


class Search:
    """The search on one way for the longest of ``lengths``, rising, that comes. Times are in seconds."""

    def __init__(self, lengths: Sequence[int], now: float) -> None:
        self._lengths = lengths
        self._at = self._rose = now
        self._begun = False
        #: The longest that came; 0: none.
        self.passed = 0

    def heard(self, length: int, now: float) -> None:
        """The receiver says that ``length`` came."""
        if length in self._lengths and length > self.passed:
            self.passed, self._rose = length, now

    def over(self, now: float) -> bool:
        """Whether nothing more will be learned."""
        return self.passed == self._lengths[-1] or now - self._rose >= (ENOUGH if self.passed else PATIENCE)

    def due(self, now: float) -> list[int]:
        """The lengths to send now: at first all, then the next two and the longest."""
        if now < self._at or self.over(now):
            return []
        longer = [length for length in self._lengths if length > self.passed]
        chosen = sorted({*longer[:2], longer[-1]}) if self._begun else longer
        self._at, self._begun = now + AGAIN, True
        return chosen


def _socket(config: LossyConfig, address: str) -> socket.socket:
    """A socket whose datagrams no router may cut."""
    port = config.udp_port + int(os.environ.get("LOCAL_RANK", 0)) if config.udp_port else 0
    family, where = resolve(address, port)
    own = socket.socket(family, socket.SOCK_DGRAM)
    try:
        own.bind(where)
    except OSError as error:
        own.close()
        raise refuse("--udp-port", port, f"{error.strerror} on {address}") from None
    own.setblocking(False)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**22)
    level, option = _DISCOVERY[family]
    own.setsockopt(level, option, _PROBE)
    return own


class _Probe:
    """The datagrams between the first rank of this host and those of others.

    ``places``: of the others. ``overhead``: bytes of a datagram beside its packet. ``number``: the same on all ranks.
    """

    def __init__(
        self,
        own: socket.socket,
        rank: int,
        places: Mapping[int, Mapping[str, Any]],
        lengths: Sequence[int],
        overhead: int,
        number: bytes,
    ) -> None:
        self._socket, self._rank, self._overhead, self._number = own, rank, overhead, number
        found = {other: resolve(place["address"], place["port"]) for other, place in places.items()}
        # Channels refuse a mixture of families, and say why.
        self._to = {other: where for other, (family, where) in found.items() if family == own.family}
        self._searches = {other: Search(lengths, time.monotonic()) for other in self._to}
        self._came = dict.fromkeys(self._to, 0)

    def run(self, say: Callable[[dict[int, int]], None], all_said: Callable[[], bool]) -> None:
        """Find out what comes at the others, ``say`` it, and answer until they all have."""
        said = False
        until = time.monotonic() + _TIMEOUT.total_seconds()
        while time.monotonic() < until:
            for other, search in self._searches.items():
                for length in search.due(time.monotonic()):
                    self._send(self._to[other], False, 0, length + self._overhead)
                self._receive(0.0)
            if not said and all(search.over(time.monotonic()) for search in self._searches.values()):
                say({other: search.passed for other, search in self._searches.items()})
                said = True
            if said and all_said():
                return
            self._receive(0.01)

    def _receive(self, seconds: float) -> None:
        """Take what has come, and answer. Waits at most ``seconds`` for it."""
        select.select([self._socket], [], [], seconds)
        while True:
            try:
                datagram, where = self._socket.recvfrom(_LONGEST)
            except BlockingIOError:
                return
            except OSError:  # what a host says of an earlier one
                continue
            if len(datagram) < _HEADER.size:
                continue
            number, other, is_answer, length = _HEADER.unpack_from(datagram)
            if number != self._number or other not in self._to:
                continue
            self._to[other] = where  # addresses may be translated
            if is_answer:
                self._searches[other].heard(length, time.monotonic())
            else:
                self._came[other] = max(self._came[other], len(datagram) - self._overhead)
                self._send(where, True, self._came[other], _HEADER.size)

    def _send(self, to: Any, is_answer: bool, length: int, size: int) -> None:
        datagram = _HEADER.pack(self._number, self._rank, is_answer, length).ljust(size, b"\0")
        with contextlib.suppress(OSError):  # too long for the interface, or no room: as if it were lost
            self._socket.sendto(datagram, to)
