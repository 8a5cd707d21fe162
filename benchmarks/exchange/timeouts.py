"""A sender that learns of a loss by its silence alone: what is not acknowledged in time is sent again, at the rate of the link.

A contestant for :mod:`benchmarks.fct_lab`. No congestion control, no window, no question from the receiver; every packet
has a time of its own, as in RoCE's simplest recovery.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

#: Bytes of a packet, and in front of them: exchange, place in the message.
PAYLOAD = 1408
HEADER = struct.Struct("<II")
_ACKNOWLEDGES = 2**31  # in place of the place
_TOGETHER = 32  # packets in an acknowledgement


@dataclass
class Message:
    """One way: ``packets`` to send, of which ``unacknowledged`` are; what came."""

    packets: list[bytes]
    begun: float
    position: int = 0
    waits: deque[tuple[float, int]] = field(default_factory=deque)  # until when, in order, and which
    unacknowledged: set[int] = field(default_factory=set)
    sent: threading.Event = field(default_factory=threading.Event)  # once


class Timeouts:
    """One of two ranks. ``pace``: bytes per second of IP packets, and seconds after which a packet is sent again."""

    def __init__(
        self, rank: int, addresses: Sequence[str], port: int, shards: Sequence[int], pace: tuple[float, float]
    ) -> None:
        self._rank, (self._rate, self._timeout) = rank, pace
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            self._socket.setsockopt(socket.SOL_SOCKET, option, 2**22)
        self._socket.bind((addresses[rank], port + rank))
        self._socket.setblocking(False)
        self._peer = (addresses[1 - rank], port + 1 - rank)
        self._number = self._expected = 0
        self._out: dict[int, Message] = {}
        self._came: dict[int, dict[int, bytes]] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    # --- what an exchanger does ------------------------------------------------------------------------------------

    def reduce_scatter(self, shard: torch.Tensor, buffer: torch.Tensor) -> None:
        mine, theirs = buffer.chunk(2)[self._rank], buffer.chunk(2)[1 - self._rank]
        arrived = torch.empty_like(shard)
        self._swap(theirs, arrived)
        torch.add(mine, arrived, out=shard)

    def all_gather(self, buffer: torch.Tensor, shard: torch.Tensor) -> None:
        parts = buffer.chunk(2)
        parts[self._rank].copy_(shard)
        self._swap(shard, parts[1 - self._rank])

    def lost(self) -> float:
        return 0.0

    def close(self) -> None:
        """Stop sending and answering."""
        self._closed = True
        self._thread.join()
        self._socket.close()

    def _swap(self, send: torch.Tensor, arrived: torch.Tensor) -> None:
        data = memoryview(send.numpy()).cast("B")
        packets = [
            HEADER.pack(self._number, place) + data[first : first + PAYLOAD]
            for place, first in enumerate(range(0, len(data), PAYLOAD))
        ]
        message = Message(packets, time.monotonic(), unacknowledged=set(range(len(packets))))
        with self._changed:
            self._out[self._number], self._expected = message, len(packets)
            self._changed.wait_for(lambda: len(self._came.get(self._number, ())) == len(packets))
            came = self._came.pop(self._number)
            self._came.pop(self._number - 1, None)  # what came again, late
        memoryview(arrived.numpy()).cast("B")[:] = b"".join(came[place] for place in range(len(packets)))
        message.sent.wait()
        self._number += 1

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        free_at, heard = 0.0, []
        while not self._closed:
            heard += self._receive()
            if heard and (len(heard) >= _TOGETHER or not self._readable(0.0)):
                for first in range(0, len(heard), _TOGETHER):
                    self._acknowledge(heard[first : first + _TOGETHER])
                heard = []
            now = time.monotonic()
            free_at = max(free_at, now - 0.001)
            due = self._next(now) if now >= free_at else None
            if due is not None:
                with contextlib.suppress(BlockingIOError):
                    self._socket.sendto(due, self._peer)
                free_at += (len(due) + 28) / self._rate
                continue
            self._readable(min(max(free_at - now, 0.0), 0.001) or 0.0005)

    def _next(self, now: float) -> bytes | None:
        """Return the packet to be sent now: what is late first."""
        with self._changed:
            messages = list(self._out.items())
        for number, message in messages:
            while message.waits and message.waits[0][0] <= now:
                _, place = message.waits.popleft()
                if place in message.unacknowledged:
                    message.waits.append((now + self._timeout, place))
                    return message.packets[place]
            if message.position < len(message.packets):
                place, message.position = message.position, message.position + 1
                message.waits.append((now + self._timeout, place))
                return message.packets[place]
            message.sent.set()
            if not message.unacknowledged:
                with self._changed:
                    del self._out[number]
        return None

    def _receive(self) -> list[tuple[int, int]]:
        """Return the packets received and not yet acknowledged: exchange and place."""
        heard = []
        for _ in range(_TOGETHER):
            try:
                packet = self._socket.recv(2048)
            except (BlockingIOError, ConnectionRefusedError):
                break
            number, place = HEADER.unpack_from(packet)
            if place >= _ACKNOWLEDGES:
                message = self._out.get(number)
                if message is not None:
                    message.unacknowledged.difference_update(
                        struct.unpack_from(f"<{place - _ACKNOWLEDGES}I", packet, 8)
                    )
                continue
            heard.append((number, place))
            with self._changed:
                if number >= self._number:
                    came = self._came.setdefault(number, {})
                    came[place] = packet[HEADER.size :]
                    if len(came) == self._expected:
                        self._changed.notify_all()
        return heard

    def _acknowledge(self, heard: Sequence[tuple[int, int]]) -> None:
        for number in {number for number, _ in heard}:
            places = [place for other, place in heard if other == number]
            packet = HEADER.pack(number, _ACKNOWLEDGES + len(places)) + struct.pack(f"<{len(places)}I", *places)
            with contextlib.suppress(BlockingIOError):
                self._socket.sendto(packet, self._peer)

    def _readable(self, seconds: float) -> bool:
        return bool(select.select([self._socket], [], [], seconds)[0])
