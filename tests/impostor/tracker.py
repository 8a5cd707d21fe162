"""Judges and counts all requests to the pretended device. The device calls its methods (csrc/observer.cpp)."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .order import Order, Range
from .places import Place, place

#: Operators that CUDA's kernels end with a copy of a size or a value to the host. ``item`` is ``_local_scalar_dense``.
_NAMES = """
_local_scalar_dense equal nonzero masked_select bincount repeat_interleave.Tensor
_unique _unique2 unique_dim unique_consecutive unique_dim_consecutive
"""
WAITING = frozenset(f"aten::{name}" for name in _NAMES.split())
#: Byte of memory of the host that an asynchronous copy has not reached yet.
POISON = 0xA5
#: How many copies may be unsettled; the oldest are judged without anybody having waited for them.
_UNSETTLED = 4096


class Count(NamedTuple):
    """A counted event. ``kind``: "synchronisation", "blocking copy", "pageable copy", "kernel", "collective", ..."""

    phase: str
    kind: str
    what: str
    place: Place


@dataclass
class _Copy:
    """An asynchronous copy between the device and page-locked memory that the host has not waited for."""

    to_device: bool
    host: torch.Tensor
    kept: torch.Tensor  # its bytes when the copy was asked for; to the host: what it brings
    after: tuple[int, int]  # (stream, its number there)
    place: Place


@dataclass
class Findings:
    """The work of a run on the device. ``counts``: times, ``bytes``: bytes copied, both by :class:`Count`."""

    counts: Counter[Count]
    bytes: Counter[Count]
    races: Counter[str]
    freed_in_use: Counter[str]
    pinned: Counter[str]

    @property
    def faults(self) -> list[str]:
        """Everything that is wrong, in words."""
        found = [("race", self.races), ("freed in use", self.freed_in_use), ("page-locked memory", self.pinned)]
        return [f"{n} x {what}: {text}" for what, texts in found for text, n in texts.most_common()]


class Tracker:
    """Set ``phase`` to count apart. ``lines``: whether places are looked for, which takes most of the time."""

    def __init__(self) -> None:
        self.phase = "start"
        self.order = Order()
        self.counts: Counter[Count] = Counter()
        self.bytes: Counter[Count] = Counter()
        self.pinned: Counter[str] = Counter()
        self.sequence: list[str] | None = None
        self._unsettled: list[_Copy] = []
        self._settling = threading.Lock()
        self._asked: set[int] = set()

    def findings(self) -> Findings:
        """Return the findings so far."""
        order = self.order
        return Findings(self.counts, self.bytes, order.races, order.freed_in_use, self.pinned)

    def _count(self, kind: str, what: str, where: Place, bytes_: int = 0) -> None:
        one = Count(self.phase, kind, what, where)
        self.counts[one] += 1
        if bytes_:
            self.bytes[one] += bytes_

    # Memory.

    def made(self, stream: int, blocks: list[tuple[int, int]]) -> None:
        """Blocks (number, bytes) were allocated."""
        where = place()
        for block, _ in blocks:
            self.order.made(block, stream, where)

    def freed(self, blocks: list[int]) -> None:
        """Nobody holds these blocks any more."""
        for block in blocks:
            self.order.freed(block)

    def announced(self, block: int, stream: int) -> None:
        """``record_stream`` was called."""
        self.order.announced(block, stream)

    # Work.

    def launched(
        self, operator: str, stream: int, reads: list[Range], writes: list[Range], waits: bool, arguments: str
    ) -> None:
        """A kernel was launched; ``waits``: its indices are such that the host waits for the result."""
        where = place()
        self.order.worked(stream, reads, writes, where, operator)
        self._count("kernel", operator, where)
        self._follow(operator, arguments)
        if waits or operator in WAITING:
            self._count("synchronisation", operator, where)
            self._host_waits(dict(self.order.of_stream(stream)))

    def viewed(self, operator: str, arguments: str) -> None:
        """Note that a tensor was viewed in another way; only called where sequences are wanted."""
        self._follow(operator, arguments)

    def copied(
        self,
        operator: str,
        stream: int,
        reads: list[Range],
        writes: list[Range],
        to_device: bool,
        blocks: bool,
        bytes_: int,
        host: torch.Tensor,
        arguments: str,
    ) -> None:
        """Bytes go between the device and ``host``; ``blocks``: not with ``non_blocking=True``."""
        where = place()
        work = self.order.worked(stream, reads, writes, where, operator)
        self._follow(operator, arguments)
        direction = "to the device" if to_device else "from the device"
        pinned = host.is_pinned()
        kind = "blocking copy" if blocks else "copy" if pinned else "pageable copy"
        self._count(kind, direction, where, bytes_)
        if kind != "copy":
            self._host_waits(dict(self.order.of_stream(stream)))
            return
        copy = _Copy(to_device, host, host.clone(), work, where)
        if not to_device and host.is_contiguous():
            _bytes(host).fill_(POISON)
        self._unsettled.append(copy)
        if len(self._unsettled) > _UNSETTLED:
            self._settle(self._unsettled.pop(0))

    def exchanged(self, collective: str, stream: int, reads: list[Range], writes: list[Range]) -> None:
        """A collective runs on a stream of its group."""
        where = place()
        self.order.worked(stream, reads, writes, where, collective)
        self._count("collective", collective, where)

    def _follow(self, operator: str, arguments: str) -> None:
        if self.sequence is not None:
            self.sequence.append(f"{operator}({arguments})")

    # Order.

    def recorded(self, event: int, stream: int) -> None:
        """``event`` was recorded on ``stream``."""
        self.order.recorded(event, stream)
        self._asked.discard(event)

    def waited(self, event: int, stream: int) -> None:
        """``stream`` will wait for ``event``."""
        self.order.waited(event, stream)

    def synchronised(self, what: str, number: int) -> None:
        """The host waited for a stream, an event or a device."""
        self._count("synchronisation", what, place())
        if what == "event":
            self._host_waits(self.order.of_event(number))
        elif what == "stream":
            self._host_waits(dict(self.order.of_stream(number)))
        else:
            self._host_waits(self.order.of_everything())

    def queried(self, event: int) -> bool:
        """Return whether ``event`` is over. The first answer is no, as a busy device's would be."""
        clock = self.order.of_event(event)
        if self.order.host_has(clock) or event in self._asked:
            self._host_waits(clock)
            return True
        self._asked.add(event)
        return False

    def _host_waits(self, clock: dict[int, int]) -> None:
        with self._settling:  # another thread must not go on before the copies it waited for are settled
            self.order.host_waited(clock)
            over, self._unsettled = self._unsettled, []
            for copy in over:
                stream, time = copy.after
                if self.order.host_has({stream: time}):
                    self._settle(copy)
                else:
                    self._unsettled.append(copy)

    def _settle(self, copy: _Copy) -> None:
        """Let ``copy`` be over: what it brings to the host is there; what it took must not have changed until now."""
        if not copy.to_device:
            if copy.host.is_contiguous() and not bool((_bytes(copy.host) == POISON).all()):
                self.pinned[f"written before the copy to it was over, which {copy.place} asked for"] += 1
            copy.host.copy_(copy.kept)
        elif not torch.equal(_bytes(copy.host), _bytes(copy.kept)):
            self.pinned[f"overwritten before the copy from it was over, which {copy.place} asked for"] += 1


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
