"""The one engine of this process, made from the flags, and the transports over it. All groups share the engine."""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from ...config import LossyConfig
from ...exchange import BucketUnits, Stream
from ..drawn import Networks
from ..key_file import read_key_file
from .address import find_address
from .carrier import Dtypes, UdpWire
from .engine import Engine
from .parity import Code
from .paths import job_name
from .settings import UdpSettings

logger = logging.getLogger(__name__)

_DEDICATED = "udp: --udp-rate-control dedicated is for a link of this training's own: others on it get little"

_engines: dict[UdpSettings, Engine] = {}


def settings_of(config: LossyConfig) -> UdpSettings:
    """The settings that the flags ask for. Raises :class:`UsageError` for an unreadable or too short key file."""
    return UdpSettings(
        interface=config.udp_interface,
        port=config.udp_port,
        rate=config.udp_bytes_per_second,
        rate_control=config.udp_rate_control,
        flows=config.udp_flows,
        deadline=config.udp_deadline_seconds,
        reorder=None if config.udp_reorder is None else config.udp_reorder / 1000,
        eager_bytes=config.udp_eager_bytes,
        memory=config.udp_memory,
        cipher=config.udp_cipher,
        key=read_key_file(config.udp_key_file),
        peer_timeout=config.udp_peer_timeout,
        packet_bytes=config.packet_bytes,
    )


def engine_for(config: LossyConfig) -> Engine:
    """This process's engine for these flags; it lives until the process ends or :func:`close_engines` is called."""
    settings = settings_of(config)
    if settings not in _engines or _engines[settings].closed:  # in a child process
        address = find_address(settings.interface, os.environ.get("MASTER_ADDR", "127.0.0.1"))
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if settings.rate_control == "dedicated" and not local_rank:
            logger.warning(_DEDICATED)
        _engines[settings] = Engine(
            settings,
            address,
            logger.warning,
            local_rank=local_rank,
            sharers=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            job=job_name(os.environ),
        )
        # The engine has registered an end without patience. This is registered later, and so runs earlier.
        atexit.unregister(close_engines)
        atexit.register(close_engines)
    return _engines[settings]


def engine_counters() -> Counter[str]:
    """Counters of the sockets of this process."""
    found: Counter[str] = Counter()
    for engine in _engines.values():
        found.update(engine.counters())
    return found


def close_engines() -> None:
    """Close every channel and socket, once others have all sent data. Runs when the process ends, too."""
    while _engines:
        _engines.popitem()[1].close()


def open_wire(
    config: LossyConfig,
    dtypes: Dtypes,
    networks: Networks,
    stream: Stream,
    members: Sequence[int],
    rank: int,
    cut: dict[str, Sequence[BucketUnits]],
    group: dist.ProcessGroup | None,
) -> UdpWire:
    """The wire of one group. A collective call. Raises :class:`UsageError` if ranks differ or are out of reach."""
    group = group or dist.group.WORLD
    # Every rank is in one group of a stream, and all make the same channels in the same order.
    first = dist.get_process_group_ranks(group)[0]
    name = f"{stream.name}-{first}"
    # A drawn prefix keeps keys of dead ranks out: torchrun may use one store for all its attempts.
    drawn = [os.urandom(8).hex()]
    dist.broadcast_object_list(drawn, first, group)
    prefix = f"megatron_lossy/udp/{name}/{drawn[0]}"
    store = dist.distributed_c10d._get_default_store()
    engine = engine_for(config)
    alike = repr((dtypes, dist.get_process_group_ranks(group)))
    open_channel = partial(engine.open, name, rank, len(members), store, prefix, alike=alike)
    code = Code(config.udp_fec_code, config.udp_fec_budget / 100)
    codes = dict.fromkeys(config.chosen(), code)
    return UdpWire(networks, stream, members, rank, cut, dtypes, group, open_channel, config.udp_memory, codes)
