"""The settings of the streams of a process."""

from __future__ import annotations

from dataclasses import dataclass

from ...config import LossyConfig
from ..network import read_key_file


@dataclass(frozen=True)
class Settings:
    """The settings of a process. ``deadline``: seconds; ``None``: there is none. ``timeout``: seconds; a silent rank is waited for a tenth
    of it."""

    interface: str | None = None
    port: int = 0
    congestion: str | None = None
    deadline: float | str | None = "auto"
    arrive: float = 0.99
    memory: int = 2**28
    cipher: str = "aes-128-gcm"
    key: bytes | None = None
    timeout: float = 30.0


def settings_of(config: LossyConfig) -> Settings:
    """The settings that the flags ask for. Raises :class:`UsageError` for an unreadable or too short key file."""
    return Settings(
        config.udp_interface,
        config.udp_port,
        config.stream_congestion,
        config.udp_deadline_seconds,
        config.deadline_share,
        config.udp_memory,
        config.udp_cipher,
        read_key_file(config.udp_key_file),
        config.udp_peer_timeout,
    )
