"""The streams of this process, made from the flags. All its channels share a port and a thread."""

from __future__ import annotations

import atexit
import json
import os
import socket
import time
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from ...base.errors import UsageError
from ...base.exchange import BucketUnits, Stream
from ...config import LossyConfig
from ..address import find_address
from ..base import Networks
from ..coded import Coded
from ..deadline import DeadlineWire, Dtypes
from ..network import read_key_file
from ..udp.session import Buckets, Store
from .channel import Channel
from .connection import Handshake
from .link import Link
from .poller import Poller
from .session import Secret, Settings, meet, share

#: Connections that have proved nothing yet. More are refused: they take files of this process.
_HANDSHAKES = 256


def settings_of(config: LossyConfig) -> Settings:
    """The settings that the flags ask for. Raises :class:`UsageError` for an unreadable or too short key file."""
    return Settings(
        config.udp_interface,
        config.udp_port,
        config.stream_flows,
        config.stream_congestion,
        config.udp_deadline_seconds,
        config.deadline_share,
        config.udp_memory,
        config.udp_cipher,
        read_key_file(config.udp_key_file),
        config.udp_peer_timeout,
    )


class Host:
    """The channels of a process. ``local_rank`` is added to the port, unless that is 0."""

    def __init__(self, settings: Settings, address: str, local_rank: int = 0) -> None:
        self.settings, self.address = settings, address
        port = settings.port and settings.port + local_rank
        self.poller = Poller(address, port, settings.congestion, settings.timeout)
        self._channels: dict[bytes, Channel] = {}
        self._shaking = 0
        #: Connections of others that came to nothing.
        self.refused = 0
        self.poller.listen(self._accepted)

    @property
    def where(self) -> str:
        """Address and port."""
        return f"{self.address}:{self.poller.port}"

    def _accepted(self, made: socket.socket) -> None:
        if self._shaking >= _HANDSHAKES:
            self.refused += 1
            made.close()
            return
        self._shaking += 1

        def over(why: str | None) -> None:
            self._shaking -= 1
            self.refused += why is not None

        Handshake(self.poller, made, self.find, over)

    def find(self, name: bytes, rank: int) -> Link | None:
        """The link to ``rank`` in the channel that handshakes call ``name``."""
        channel = self._channels.get(name)
        return None if channel is None else channel.links.get(rank)

    def open(
        self,
        name: str,
        rank: int,
        size: int,
        store: Store,
        prefix: str,
        buckets: Buckets,
        *,
        peers: Sequence[int] | None = None,
        alike: str = "",
        reported: Sequence[str] = (),
        phases: Sequence[str] = ("grad", "param"),
        called: Sequence[int] | None = None,
        codes: Mapping[str, str] = MappingProxyType({}),
        bears: bool = False,
    ) -> Channel:
        """Open a channel of ``size`` ranks, a collective call. The arguments are those of the engine of datagrams.

        Raises :class:`UsageError`, the same on all ranks, if they differ or cannot reach each other.
        """
        settings, where = self.settings, (self.address, self.poller.port)
        hellos = meet(name, rank, where, size, store, prefix, buckets, phases, alike, codes, settings)
        others = sorted(set(range(size) if peers is None else peers) - {rank})
        named = range(size) if called is None else called
        cut = {phase: list(buckets.get(phase, ())) for phase in phases}
        secret = Secret(name, hellos, settings.key)
        forget = partial(self._channels.pop, secret.channel, None)
        channel = Channel(self.poller, settings, name, rank, hellos, secret, others, cut, codes, named, forget)
        self._channels[secret.channel] = channel
        try:
            share(store, f"{prefix}/opened", rank, size, b"1")
            channel.dial()
            self._reach(channel, store, prefix, hellos)
        except BaseException:
            channel.close(linger=0.0)
            raise
        return channel

    def _reach(self, channel: Channel, store: Store, prefix: str, hellos: Sequence[Any]) -> None:
        until = time.monotonic() + self.settings.timeout
        while time.monotonic() < until and not all(link.connections for link in channel.links.values()):
            time.sleep(0.002)
        missing = {rank: link.problem for rank, link in channel.links.items() if not link.connections}
        rows = share(store, f"{prefix}/reached", channel.rank, len(hellos), json.dumps(missing).encode())
        for rank in reversed(range(len(rows))):  # of each pair the higher rank has called, and knows more
            for other, why in json.loads(rows[rank]).items():
                ends = (f"rank {one} of {channel.name} ({hellos[one].where})" for one in (rank, int(other)))
                raise UsageError(
                    f"--transport stream: {' does not reach '.join(ends)}: {why}; a firewall has to let TCP connections to "
                    "--udp-port in, and --udp-interface names another path"
                )

    def close(self) -> None:
        """Close all channels, and the port."""
        for channel in list(self._channels.values()):
            channel.close()
        self.poller.close()


_hosts: dict[tuple[Settings, str], Host] = {}


def _forked() -> None:
    while _hosts:  # a child has none of its parent's threads
        _hosts.popitem()[1].poller.forked()


os.register_at_fork(after_in_child=_forked)


def host_for(config: LossyConfig, towards: str | None = None) -> Host:
    """The streams of this process for these flags; they live until it ends or :func:`close_hosts` is called.

    ``towards``: a host; without ``--udp-interface`` the address is the one that reaches it. Default: MASTER_ADDR.
    """
    settings = settings_of(config)
    address = find_address(settings.interface, towards or os.environ.get("MASTER_ADDR", "127.0.0.1"))
    if (settings, address) not in _hosts:
        _hosts[settings, address] = Host(settings, address, int(os.environ.get("LOCAL_RANK", 0)))
        atexit.unregister(close_hosts)
        atexit.register(close_hosts)
    return _hosts[settings, address]


def refused_connections() -> int:
    """Connections of strangers to this process."""
    return sum(host.refused for host in _hosts.values())


def close_hosts() -> None:
    """Close all streams of this process."""
    while _hosts:
        _hosts.popitem()[1].close()


def open_wire(
    config: LossyConfig,
    dtypes: Dtypes,
    networks: Networks,
    stream: Stream,
    members: Sequence[int],
    rank: int,
    cut: dict[str, Sequence[BucketUnits]],
    group: dist.ProcessGroup | None,
    coded: Mapping[str, Coded],
) -> DeadlineWire:
    """The wire of one group. A collective call. Raises :class:`UsageError` if ranks differ or are out of reach."""
    group = group or dist.group.WORLD
    ranks = dist.get_process_group_ranks(group)
    name = f"{stream.name}-{ranks[0]}"
    # A drawn prefix keeps keys of dead ranks out: torchrun may use one store for all its attempts.
    drawn = [os.urandom(8).hex()]
    dist.broadcast_object_list(drawn, ranks[0], group)
    prefix, store = f"megatron_lossy/stream/{name}/{drawn[0]}", dist.distributed_c10d._get_default_store()
    codes = {phase: str(one.code) for phase, one in coded.items()}
    alike = repr((dtypes, ranks, [one.code for one in coded.values()]))
    host = host_for(config)

    def open_channels(buckets: Buckets, **options: Any) -> list[Channel]:
        options |= {"alike": alike, "codes": codes}
        return [host.open(name, rank, len(members), store, prefix, buckets, **options)]

    return DeadlineWire(
        networks, stream, members, rank, cut, dtypes, group, open_channels, config.udp_memory, coded=coded
    )
