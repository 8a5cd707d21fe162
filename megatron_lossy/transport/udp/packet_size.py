"""``--packet-bytes auto``: the largest packets that the paths between all hosts carry, found before the run.

One rank of each host opens a channel with one of each other host, which tries full packets: the longest first, and then by
halves (RFC 8899). All ranks take the longest that came on every path. Where none comes at all it is the default, and the
channels of the run say which path that is.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ...base.device.attempt import attempt_store
from ...base.errors import UsageError, refuse
from ...config import LossyConfig
from ...config.transport import UDP_PACKET_BYTES, UDP_PACKETS
from ..address import find_address, mtu_of
from ..network import read_key_file
from ..settings import Settings
from .engine import Engine
from .session import overhead

logger = logging.getLogger(__name__)

#: MTUs of networks and tunnels, in bytes.
MTUS = (576, 1024, 1280, 1350, 1400, 1420, 1450, 1500, 2048, 3072, 4096, 4470, 6144, 8192, 8896, 8950, 9000)
#: Packets are a multiple of so many bytes.
STEP = 64
_TIMEOUT = timedelta(minutes=10)
#: Seconds between the first rank and the last, once all have found each other.
_TOGETHER = timedelta(seconds=60)

_agreed: dict[tuple[Any, ...], int] = {}
_stores: list[Any] = []  # whose servers other ranks may still read


def agreed(config: LossyConfig) -> int:
    """Return the number for ``--packet-bytes auto``. A collective call of all ranks, with a process group or not.

    The result holds for the whole process.
    """
    key = config.udp_interface, config.udp_port, config.udp_cipher
    if key not in _agreed:
        _agreed[key] = _agree(config)
    return _agreed[key]


def _agree(config: LossyConfig) -> int:
    """Return the most bytes of a packet that come on all paths."""
    address = find_address(config.udp_interface, os.environ.get("MASTER_ADDR", "127.0.0.1"))
    store, prefix, rank, size = _meeting()
    store.set(f"{prefix}/place/{rank}", json.dumps([address, mtu_of(address) or 1500]))
    keys = [f"{prefix}/place/{other}" for other in range(size)]
    try:
        store.wait(keys, _TOGETHER)
    except dist.DistStoreError:
        why = f"not all ranks came to agree within {_TOGETHER.seconds} s: all must have it, or the same number"
        raise refuse("--packet-bytes", "auto", why) from None
    addresses, mtus = zip(*(json.loads(store.get(key)) for key in keys), strict=True)
    hosts = [other for other, place in enumerate(addresses) if addresses.index(place) == other]
    lengths = candidates(min(mtus), overhead(config.udp_cipher) + (48 if ":" in address else 28))
    problems = [f"the least MTU of the interfaces is {min(mtus):,}"]

    def passes(length: int) -> bool:
        port = config.udp_port and config.udp_port + int(os.environ.get("LOCAL_RANK", 0))
        key = read_key_file(config.udp_key_file)
        settings = Settings(port=port, cipher=config.udp_cipher, key=key, packet_bytes=length)
        try:
            with Engine(settings, address, logger.debug) as engine:
                engine.open("packets", hosts.index(rank), len(hosts), store, f"{prefix}/{length}", {})
        except UsageError as error:
            if f"{length + overhead(config.udp_cipher):,} bytes" not in str(error):
                raise
            problems.append(str(error).partition(": ")[2])
            return False
        return True

    if rank in hosts:
        taken = longest(lengths, passes if len(hosts) > 1 else lambda _: True)
        store.set(f"{prefix}/taken/{rank}", str(taken))
    taken = int(store.get(f"{prefix}/taken/{addresses.index(address)}"))
    if rank == 0:
        logger.warning("udp: --packet-bytes auto takes %d: %s", taken, problems[-1])
    return taken


def _meeting() -> tuple[Any, str, int, int]:
    """Return a store of all ranks, a prefix of new keys in it, the rank, and the number of ranks."""
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
    """Return the lengths of packets to try, rising, where interfaces take packets of ``mtu`` bytes with ``headers``."""
    least, most = UDP_PACKETS
    top = min(max((mtu - headers) // STEP * STEP, least), most)
    return sorted({top, *(n for mtu in MTUS if least <= (n := (mtu - headers) // STEP * STEP) < top)})


def longest(lengths: Sequence[int], passes: Callable[[int], bool]) -> int:
    """Return the longest of ``lengths``, rising, that ``passes``; the default, or what is shorter, if none does."""
    low, high = 0, len(lengths)  # those below `low` pass, from `high` on they do not
    middle = high - 1
    while low < high:
        if passes(lengths[middle]):
            low = middle + 1
        else:
            high = middle
        middle = (low + high) // 2
    return lengths[low - 1] if low else max((n for n in lengths if n <= UDP_PACKET_BYTES), default=lengths[0])
