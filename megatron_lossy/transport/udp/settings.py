"""The settings of the UDP transport that a user can choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist

from ...config import LossyConfig
from ..network import LEAST_BYTES, read_key_file

MIB = 1 << 20


@dataclass(frozen=True)
class UdpSettings:
    """The settings of one process. ``rate`` is in bytes per second, times are in seconds; ``None``: engine's choice.

    ``flows``: with ``shared``, the number of TCP flows that are as fair to others as the datagrams to another process are.
    ``port`` is the port of the first process of a host, or 0. All ranks must have the same ``cipher``, ``key`` and
    ``packet_bytes``. ``eager_bytes``: bytes that each other rank may send before this one has posted; fewer if ``memory`` is too
    small for all.
    """

    interface: str | None = None
    port: int = 0
    rate: float | None = None
    rate_control: Literal["shared", "dedicated", "fixed"] = "shared"
    flows: int = 1
    deadline: float | Literal["auto"] | None = None
    reorder: float | None = None
    eager_bytes: int = 4 * MIB
    memory: int = 256 * MIB
    cipher: Literal["aes-128-gcm", "none"] = "aes-128-gcm"
    key: bytes | None = None
    peer_timeout: float = 30.0
    packet_bytes: int = 1408
    #: Bytes to ask for as the socket's buffers. The sysctl limits them, except for a privileged process.
    socket_buffer: int = 16 * MIB

    def __post_init__(self) -> None:
        if self.key is not None and len(self.key) < LEAST_BYTES:
            raise ValueError(f"a key of {len(self.key)} bytes: must have at least {LEAST_BYTES}, or be None")


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
        eager_bytes=min(4 * MIB, config.udp_memory // 16),
        memory=config.udp_memory,
        cipher=config.udp_cipher,
        key=read_key_file(config.udp_key_file),
        peer_timeout=config.udp_peer_timeout,
        packet_bytes=config.packet_bytes,
    )
