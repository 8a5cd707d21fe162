"""The engines of this process, made from the flags, and the transports over them. All groups share them."""

from __future__ import annotations

import atexit
import logging
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ...base.exchange import BucketUnits, Stream
from ...config import LossyConfig
from ..address import find_addresses
from ..base import Networks
from ..coded import Coded
from ..deadline import DeadlineWire, Dtypes
from ..network import read_key_file
from .engine import Channel, Engine
from .parity import Code
from .paths import job_name
from .session import Buckets
from .settings import UdpSettings

logger = logging.getLogger(__name__)

#: Bytes of an exchange that are sent to a rank before it asks for them.
_EAGER_BYTES = 1 << 22
_DEDICATED = "udp: --udp-rate-control dedicated is for a link of this training's own: others on it get little"

#: By settings and addresses.
_engines: dict[tuple[UdpSettings, tuple[str, ...]], list[Engine]] = {}


def settings_of(config: LossyConfig) -> UdpSettings:
    """The settings that the flags ask for. Raises :class:`UsageError` for an unreadable or too short key file."""
    rule, flows = config.udp_rate_rule
    return UdpSettings(
        interfaces=config.udp_interfaces,
        port=config.udp_port,
        threads=config.udp_sockets,
        rate=config.udp_bytes_per_second,
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
    """The first of :func:`engines_for`: for small messages."""
    return engines_for(config, towards)[0]


def engines_for(config: LossyConfig, towards: str | None = None) -> list[Engine]:
    """This process's engines for these flags; they live until the process ends or :func:`close_engines` is called.

    ``towards``: a host; without ``--udp-interface`` they send from the address that reaches it. Default: MASTER_ADDR.
    """
    settings = settings_of(config)
    addresses = find_addresses(settings.interfaces, towards or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    key = settings, tuple(addresses)
    if key not in _engines or _engines[key][0].closed:  # in a child process
        local_rank = int(os.environ.get("LOCAL_RANK", 0))
        if settings.rate_control == "dedicated" and not local_rank:
            logger.warning(_DEDICATED)
        threads, job = settings.threads, job_name(os.environ)
        own = replace(
            settings,
            rate=None if settings.rate is None else settings.rate / threads,
            memory=settings.memory // threads,
        )
        engines: list[Engine] = []
        try:
            for number in range(threads):
                first = number % len(addresses)
                engine = Engine(
                    own,
                    addresses[first],
                    logger.warning,
                    local_rank=local_rank * threads + number,
                    sharers=int(os.environ.get("LOCAL_WORLD_SIZE", 1)) * -(-threads // len(addresses)),
                    others=addresses[first + 1 :] + addresses[:first],
                    job=job if threads == 1 else job or f"process {os.getpid()}",
                )
                engines.append(engine)
        except BaseException:
            for engine in engines:
                engine.close(0.0)
            raise
        _engines[key] = engines
        # The engines have registered an end without patience. This is registered later, and so runs earlier.
        atexit.unregister(close_engines)
        atexit.register(close_engines)
    return _engines[key]


def engine_counters() -> Counter[str]:
    """Counters of the sockets of this process."""
    found: Counter[str] = Counter()
    for engines in _engines.values():
        for engine in engines:
            found.update(engine.counters())
    return found


def close_engines() -> None:
    """Close every channel and socket, once others have all sent data. Runs when the process ends, too."""
    while _engines:
        for engine in _engines.popitem()[1]:
            engine.close()


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
) -> DeadlineWire:
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
    engines = engines_for(config)
    coded = coded or {}
    codes_of_values = {phase: str(one.code) for phase, one in coded.items()}
    alike = repr((dtypes, dist.get_process_group_ranks(group), [one.code for one in coded.values()]))

    def open_channels(buckets: Buckets, **options: Any) -> list[Channel]:
        channels: list[Channel] = []
        try:
            for number, engine in enumerate(engines):
                place = (name, prefix) if not number else (f"{name}, socket {number}", f"{prefix}/{number}")
                opened = engine.open(
                    place[0],
                    rank,
                    len(members),
                    store,
                    place[1],
                    buckets,
                    alike=alike,
                    codes=codes_of_values,
                    **options,
                )
                channels.append(opened)
        except BaseException:
            for channel in channels:
                channel.close(0.0)
            raise
        return channels

    code = Code(config.udp_fec_code, config.udp_fec_budget / 100)
    codes = dict.fromkeys(config.chosen(), code)
    return DeadlineWire(
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
        len(engines),
        coded,
        {phase: config.copies(phase) for phase in cut},
    )
