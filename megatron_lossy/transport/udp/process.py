"""The engines of this process, made from the flags, and the transports over them. All groups share them."""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ...base.exchange import BucketUnits, Stream
from ...config import LossyConfig
from ..base import Networks
from ..coded import Coded
from ..network import read_key_file
from .address import find_address
from .carrier import Dtypes, UdpWire
from .engine import Channel, Engine
from .parity import Code
from .session import Buckets
from .settings import UdpSettings

logger = logging.getLogger(__name__)

#: Bytes of an exchange that are sent to a rank before it asks for them.
_EAGER_BYTES = 1 << 22
_DEDICATED = "udp: --udp-rate dedicated is for a link of this training's own: others on it get little"

#: By settings and address.
_engines: dict[tuple[UdpSettings, str], Engine] = {}


def settings_of(config: LossyConfig) -> UdpSettings:
    """The settings that the flags ask for. Raises :class:`UsageError` for an unreadable or too short key file."""
    rule, flows = config.udp_rate_rule
    rate = config.udp_bytes_per_second
    if rate is not None and config.sites is not None:
        rate /= dist.get_world_size() // config.sites
    return UdpSettings(
        interface=config.udp_interface,
        port=config.udp_port,
        rate=rate,
        rate_control=rule,
        flows=flows,
        deadline=config.udp_deadline_seconds,
        eager_bytes=min(_EAGER_BYTES, config.udp_memory // 16),
        memory=config.udp_memory,
        cipher=config.udp_cipher,
        key=read_key_file(config.udp_key_file),
        peer_timeout=config.udp_peer_timeout,
        packet_bytes=config.packet_bytes,
    )


def engine_for(config: LossyConfig, towards: str | None = None) -> Engine:
    """This process's engine for these flags; it lives until the process ends or :func:`close_engines` is called.

    ``towards``: a host; without ``--udp-interface`` it sends from the address that reaches it. Default: MASTER_ADDR.
    """
    settings = settings_of(config)
    address = find_address(settings.interface, towards or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    key = settings, address
    if key not in _engines or _engines[key].closed:  # in a child process
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if settings.rate_control == "dedicated" and not local_rank:
            logger.warning(_DEDICATED)
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        _engines[key] = Engine(settings, address, logger.warning, local_rank=local_rank, sharers=sharers)
        # The engine has registered an end without patience. This is registered later, and so runs earlier.
        atexit.unregister(close_engines)
        atexit.register(close_engines)
    return _engines[key]


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
    coded: Mapping[str, Coded] | None = None,
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
    coded = coded or {}
    codes_of_values = {phase: str(one.code) for phase, one in coded.items()}
    alike = repr((dtypes, dist.get_process_group_ranks(group), [one.code for one in coded.values()]))

    def open_channels(buckets: Buckets, **options: Any) -> list[Channel]:
        size = len(members)
        return [engine.open(name, rank, size, store, prefix, buckets, alike=alike, codes=codes_of_values, **options)]

    code = Code(config.udp_fec_code, config.udp_fec_budget / 100)
    codes = dict.fromkeys(config.chosen(), code)
    return UdpWire(
        networks,
        stream,
        members,
        rank,
        cut,
        dtypes,
        group,
        open_channels,
        config.udp_memory,
        codes,
        coded=coded,
        passes={phase: config.copies(phase) for phase in cut},
    )
