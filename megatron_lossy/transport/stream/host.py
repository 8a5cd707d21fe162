"""The streams of this process. All its channels share a port and a thread."""

from __future__ import annotations

import json
import os
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...base.errors import UsageError
from ..udp import session
from .channel import Channel
from .connection import Handshake
from .link import Link
from .poller import Poller
from .settings import Settings

#: Connections that have proved nothing yet. More are refused: they take files of this process.
_HANDSHAKES = 256
#: The version of frames, handshakes and entries in the store.
PROTOCOL = 1


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
        self.closed = False
        self.poller.listen(self._accepted)
        _alive.add(self)

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

        Handshake(self.poller, made, over, find=self.find)

    def find(self, name: bytes, rank: int) -> Link | None:
        """The link to ``rank`` in the channel that handshakes call ``name``."""
        channel = self._channels.get(name)
        return None if channel is None else channel.links.get(rank)

    def open(
        self,
        name: str,
        rank: int,
        size: int,
        store: session.Store,
        prefix: str,
        buckets: session.Buckets,
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
        settings, random = self.settings, os.urandom(16).hex()
        mine = session.Hello(
            address=self.address,
            port=self.poller.port,
            random=random,
            proof=session.prove(settings.key, random),
            buckets=session.digest_buckets(buckets, alike, phases),
            size=size,
            protocol=PROTOCOL,
            cipher=settings.cipher,
            codes=session.forms(codes, phases),
        )
        hellos = session.meet(name, rank, store, prefix, mine, settings.key, "stream")
        secret = session.Secrets(name, 0, hellos, settings.key)
        others = sorted(set(range(size) if peers is None else peers) - {rank})
        named = range(size) if called is None else called
        cut = {phase: list(buckets.get(phase, ())) for phase in phases}
        channel = Channel(self, name, rank, hellos, secret, others, cut, codes, named)
        self._channels[channel.id] = channel
        try:
            session.share(store, f"{prefix}/opened", rank, size, b"1")
            channel.dial()
            self._reach(channel, store, prefix, hellos)
        except BaseException:
            channel.close(linger=0.0)
            raise
        return channel

    def _reach(self, channel: Channel, store: session.Store, prefix: str, hellos: Sequence[session.Hello]) -> None:
        until = time.monotonic() + self.settings.timeout
        while time.monotonic() < until and not all(link.connection for link in channel.links.values()):
            time.sleep(0.002)
        missing = {rank: link.problem for rank, link in channel.links.items() if not link.connection}
        rows = session.share(store, f"{prefix}/reached", channel.rank, len(hellos), json.dumps(missing).encode())
        for rank in reversed(range(len(rows))):  # of each pair the higher rank has called, and knows more
            for other, why in json.loads(rows[rank]).items():
                ends = (f"rank {one} of {channel.name} ({hellos[one].where})" for one in (rank, int(other)))
                raise UsageError(
                    f"--transport stream: {' does not reach '.join(ends)}: {why}; a firewall has to let TCP connections to "
                    "--udp-port in, and --udp-interface names another path"
                )

    def forget(self, channel: Channel) -> None:
        """Do without a channel that is closed."""
        self._channels.pop(channel.id, None)

    def counters(self) -> dict[str, int]:
        """Connections of strangers."""
        return {"strangers": self.refused}

    def close(self) -> None:
        """Close all channels, and the port."""
        if not self.closed:
            for channel in list(self._channels.values()):
                channel.close()
            self.closed = True
            self.poller.close()

    def forked(self) -> None:
        """Release the streams in a child process, which has none of its parent's threads."""
        self.closed = True
        self.poller.forked()


#: Hosts of this process.
_alive: weakref.WeakSet[Host] = weakref.WeakSet()


def _forked() -> None:
    for host in [one for one in _alive if not one.closed]:
        host.forked()


os.register_at_fork(after_in_child=_forked)


def made(settings: Settings, address: str, local_rank: int) -> Host:
    """The streams of this process, one of those of its host."""
    return Host(settings, address, local_rank)
