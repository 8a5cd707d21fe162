"""The engine of this process, and its channels."""

from __future__ import annotations

import atexit
import ctypes
import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from ...base.errors import refuse
from ..address import speed_of
from ..forks import in_children
from ..settings import MIB, Settings
from . import session
from .channel import Channel
from .library import RULES, SECOND, CSettings, load, pack_address

logger = logging.getLogger(__name__)

#: Number of DATA datagrams that may always be on the way, whatever the receiver's buffer.
LEAST_WINDOW = 8

#: A receive buffer below this size, as the kernel counts, is reported to the user; the command allows 4 MiB.
LITTLE_BUFFER, MORE_BUFFER = 8 * MIB, "sysctl -w net.core.rmem_max=4194304"

_DEDICATED = "udp: --udp-rate dedicated is for a link of this training's own: others on it get little"


def charge(datagram: int) -> int:
    """Return bytes of a socket's buffer that the kernel takes for a datagram of Ethernet's size, or a larger one."""
    return 2304 if datagram <= 1500 else (1 << (datagram + 320).bit_length()) + 256


def windows(granted: int, datagram: int, peers: int) -> tuple[int, int]:
    """Return numbers of DATA datagrams that each of ``peers`` may have on the way to a socket with ``granted`` bytes.

    Return two numbers: the one that fits with ease, and the largest one.
    """
    held = granted // charge(datagram) // max(peers, 1)
    return max(held // 3, LEAST_WINDOW), max(held * 9 // 10, LEAST_WINDOW)


class Engine:
    """One socket and one thread. A context manager.

    Args:
        settings: the settings of this process.
        address: the numeric address to send from (:func:`.address.find_address`).
        log: called with lines for the user.
        local_rank: added to ``settings.port``, unless that is 0.
        sharers: processes of this host that share the interface's speed, if no rate is set.
    """

    def __init__(
        self,
        settings: Settings,
        address: str,
        log: Callable[[str], None] = print,
        *,
        local_rank: int = 0,
        sharers: int = 1,
    ) -> None:
        self.settings = settings
        self.address = address
        self.instance = int.from_bytes(os.urandom(8), "little")
        self.datagram = settings.packet_bytes + session.overhead(settings.cipher)
        self.rate = settings.rate or speed_of(address) / sharers
        self._channels: list[Channel] = []
        self._lock = threading.RLock()  # guards the promises to senders
        self._lib = load()
        if settings.cipher != "none" and self._lib.ml_load_cipher():
            raise refuse("--transport", "udp", session.NO_CIPHER)
        packed = pack_address(address, settings.port + local_rank if settings.port else 0)
        result = (ctypes.c_int64 * 3)()
        taken = CSettings(
            rate=self.rate,
            reorder=-1 if settings.reorder is None else int(settings.reorder * SECOND),
            peer_timeout=int(settings.peer_timeout * SECOND),
            eager=settings.eager_bytes,
            memory=settings.memory,
            packet=settings.packet_bytes,
            cipher=settings.cipher != "none",
            rule=RULES[settings.rate_control],
            flows=settings.flows,
            clock=time.time_ns() - time.monotonic_ns(),
        )
        self._engine = self._lib.ml_create(ctypes.byref(taken), packed, len(packed), settings.socket_buffer, result)
        if not self._engine:
            raise self._refusal(result[2], settings.port + local_rank)
        atexit.register(self.close, 0.0)  # its thread must not outlive the memory that it reads
        in_children(self, Engine._forked)
        self.port: int = result[0]
        #: Bytes of the receive buffer, as the kernel counts them.
        self.granted: int = result[1]
        if self.granted < LITTLE_BUFFER:
            log(
                f"udp: the receive buffer of {address}:{self.port} holds {self.granted // charge(self.datagram)} "
                f"datagrams; for 4 MiB: {MORE_BUFFER}"
            )
        if settings.rate_control == "fixed":
            log(f"udp: fixed rate of {self.rate / 1e6:.0f} MB/s, whatever else the network carries")

    def _refusal(self, number: int, port: int) -> Exception:
        if number in (errno.EADDRINUSE, errno.EACCES):
            return refuse("--udp-port", port, f"{os.strerror(number)} on {self.address}")
        if number in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL):
            return refuse("--udp-interface", self.address, f"{os.strerror(number)} on this host")
        return OSError(number, os.strerror(number), "the UDP socket")

    def open(self, *arguments: Any, **options: Any) -> Channel:
        """Open a channel, a collective call of its ranks. The arguments are those of :class:`.Opening`."""
        if self.closed:
            raise RuntimeError(f"the engine of {self.address} is closed, or that of a process that forked this one")
        return Channel(self, session.Opening(*arguments, **options))

    @property
    def closed(self) -> bool:
        """Whether no channel can be opened any more."""
        return not self._engine

    def windows(self, more: int = 0) -> tuple[int, int]:
        """Return :func:`windows` of each process that sends to this one, over all channels and ``more`` processes."""
        return windows(self.granted, self.datagram, len(self.senders) + more)

    @property
    def senders(self) -> set[str]:
        """The processes that send to this one, over all channels, by their instance."""
        return {channel.hellos[peer].instance for channel in self._channels if channel.hellos for peer in channel.peers}

    def promise(self) -> None:
        """Send all senders their share of the buffer, after a channel was opened or closed."""
        with self._lock:
            if self._engine:
                self._lib.ml_promise(self._engine, *self.windows())

    def counters(self) -> dict[str, int]:
        """Return counters of the socket, and of datagrams that belong to no rank; empty for a closed engine."""
        if not self._engine:
            return {}
        names = self._lib.ml_engine_counter_names().decode().rstrip(",").split(",")
        values = (ctypes.c_uint64 * len(names))()
        self._lib.ml_engine_counters(self._engine, values)
        return dict(zip(names, values))

    def close(self, linger: float = 5.0) -> None:
        """Close all channels, and the socket. ``linger``: see :meth:`Channel.close`."""
        for channel in list(self._channels):
            channel.close(linger)
        with self._lock:
            engine, self._engine = self._engine, None
            if engine:
                self._lib.ml_free(engine)
                atexit.unregister(self.close)

    def _forked(self) -> None:
        """Release the engine in a child process: it has no engine thread, and the sockets belong to the parent."""
        atexit.unregister(self.close)
        self._lock = threading.RLock()
        engine, self._engine = self._engine, None
        if engine:
            self._lib.ml_close_sockets(engine)
        for channel in self._channels:
            channel._forked()
        self._channels.clear()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(linger=0.0 if kind else 5.0)


def made(settings: Settings, address: str, local_rank: int) -> Engine:
    """Return the engine of this process, one of those of its host."""
    if settings.rate_control == "dedicated" and not local_rank:
        logger.warning(_DEDICATED)
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return Engine(settings, address, logger.warning, local_rank=local_rank, sharers=sharers)
