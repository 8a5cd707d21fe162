"""The settings of a process on a network that a user can choose, for datagrams and for streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from ..config import LossyConfig
from .network import read_key_file

MIB = 1 << 20


@dataclass(frozen=True)
class Settings:
    """The settings of one process. ``rate`` is in bytes per second, times are in seconds; ``None``: there is none, or engine's choice.

    ``port`` is the port of the first process of a host, or 0. All ranks must have the same ``cipher`` and ``key``. A rank is gone, and a
    connection broken, after ``peer_timeout``; streams wait for a silent rank a tenth of it.
    """

    interface: str | None = None
    port: int = 0
    deadline: float | Literal["auto"] | None = None
    memory: int = 256 * MIB
    cipher: Literal["aes-128-gcm", "none"] = "aes-128-gcm"
    key: bytes | None = None
    peer_timeout: float = 30.0
    # Of streams: the kernel's congestion control, and the share of units that an automatic deadline waits for.
    congestion: str | None = None
    arrive: float = 0.99
    # Of datagrams. ``flows``: with ``shared``, the number of TCP flows that are as fair to others as the datagrams to another process are.
    rate: float | None = None
    rate_control: Literal["shared", "dedicated", "fixed"] = "shared"
    flows: int = 1
    reorder: float | None = None
    #: Bytes that each other rank may send before this one has posted; fewer if ``memory`` is too small for all.
    eager_bytes: int = 4 * MIB
    packet_bytes: int = 1408
    #: Bytes to ask for as the socket's buffers. The sysctl limits them, except for a privileged process.
    socket_buffer: int = 16 * MIB


def settings_of(config: LossyConfig) -> Settings:
    """Return the settings that the flags ask for. Raise :class:`UsageError` for an unreadable or too short key file."""
    both = {
        "interface": config.udp_interface,
        "port": config.udp_port,
        "deadline": config.udp_deadline_seconds,
        "memory": config.udp_memory,
        "cipher": config.udp_cipher,
        "key": read_key_file(config.udp_key_file),
        "peer_timeout": config.udp_peer_timeout,
    }
    if config.transport == "stream":
        return Settings(**both, congestion=config.stream_congestion, arrive=config.deadline_share)
    rule, flows = config.udp_rate_rule
    rate = config.udp_bytes_per_second
    if rate is not None and config.sites is not None:
        rate /= dist.get_world_size() // config.sites
    return Settings(
        **both,
        rate=rate,
        rate_control=rule,
        flows=flows,
        eager_bytes=min(4 * MIB, config.udp_memory // 16),
        packet_bytes=config.packet_bytes,
    )
