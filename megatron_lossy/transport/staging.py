"""Page-locked memory between a device and the network; and the patience with a rank that lives.

A network is on the CPU: what a device sends is copied down into page-locked memory, and what arrives is copied up. A
process has one stream and one thread for each direction, and a ring of memory that bounds what crosses at once. The
thread that computes only records an event when it begins, and makes its stream wait for another when it needs the data.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from ..base.device import current_device
from .leaving import PeerLost

#: The places of the ring are multiples of this many bytes.
_ALIGNMENT = 512


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device for tensors of ``group``'s collectives."""
    return torch.device("cpu") if dist.get_backend(group) == "gloo" else current_device()


def patience_of(group: dist.ProcessGroup | None) -> float:
    """Return seconds that a collective of ``group`` would wait for a rank."""
    group = group or dist.group.WORLD
    options = getattr(group._get_backend(device_of(group)), "options", None)
    return getattr(options, "_timeout", default_pg_timeout).total_seconds()


def staged(buffer: torch.Tensor) -> bool:
    """Return whether a network, which is on the CPU, cannot read and write ``buffer`` in place."""
    return buffer.device.type != "cpu"


# --- streams and events ------------------------------------------------------------------------------------------------


@functools.cache
def _streams(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the streams of this process for copies from ``device``, and to it."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def _mark(device: torch.device) -> Any:
    """Return an event after the work that the current stream of ``device`` was given; ``None`` on a CPU.

    Its wait sleeps: a thread that spins would take a processor from the network.
    """
    if device.type == "cpu":
        return None
    event = torch.cuda.Event(blocking=True) if device.type == "cuda" else getattr(torch, device.type).Event()
    event.record()
    return event


def _copy_down(rows: Sequence[torch.Tensor], into: Sequence[torch.Tensor], made: Any) -> Any:
    """Begin to copy each of ``rows`` into page-locked memory. Return an event; ``None``: the copy is over.

    ``made``: an event after the work that makes ``rows``. Call it on a thread that may wait: only CUDA has streams for
    copies here.
    """
    device = rows[0].device
    if device.type != "cuda":
        if made is not None:
            made.synchronize()
        for row, memory in zip(rows, into, strict=True):
            memory.copy_(row)
        return None
    down, _ = _streams(device)
    down.wait_event(made)
    with torch.cuda.stream(down):
        for row, memory in zip(rows, into, strict=True):
            memory.copy_(row, non_blocking=True)
            row.record_stream(down)
        return _mark(device)


# --- exchanges ---------------------------------------------------------------------------------------------------------


class Message(ABC):
    """An exchange of a channel, whatever carries it. ``keep``: owns the memory that is read and written.

    ``arrived`` bool[N, units]: the units that arrived, after :meth:`wait`.
    """

    keep: object
    arrived: np.ndarray | None

    @abstractmethod
    def wait(self, timeout: float | None = None) -> np.ndarray:
        """Return bool[N, units]: arrived units. Raise :class:`PeerLost`, or TimeoutError after ``timeout`` seconds."""

    @abstractmethod
    def sent(self, timeout: float | None = None) -> None:
        """Wait until nothing is read from the sources any more. Raise as :meth:`wait`."""

    @abstractmethod
    def all_sent(self) -> bool:
        """Return whether nothing is read from the sources any more. Raise :class:`PeerLost`."""

    def finish(self, seconds: float) -> None:
        """Wait until nothing more arrives, and all is sent. Raise :class:`PeerLost`, also if a live rank sends nothing for ``seconds``."""
        until = time.monotonic() + seconds
        try:
            self.wait(seconds)
            self.sent(max(until - time.monotonic(), 0.0))
        except TimeoutError as error:
            raise PeerLost(f"{error}: nothing for {seconds:g} s") from None


class Ring:
    """Memory that is taken and given back in the same order. ``pinned``: whether it is page-locked."""

    def __init__(self, size: int, pinned: bool) -> None:
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self._changed = threading.Condition()
        self._first = self._end = 0  # of what is taken, as if the memory began again behind its end
        self._taken: deque[int] = deque()  # the end of each
        self._given: deque[Any] = deque()  # events after which the oldest taken ones are free
        self._broken = False

    def take(self, size: int) -> torch.Tensor | None:
        """Take uint8[size], once there is room. ``None``: a part of the memory will never come back."""
        size, total = -(-size // _ALIGNMENT) * _ALIGNMENT, self._memory.numel()
        assert size <= total, "the wire cuts exchanges so that they fit"
        with self._changed:
            while not self._broken:
                while self._given and (self._given[0] is None or self._given[0].query()):
                    self._given.popleft()
                    self._first = self._taken.popleft()
                start = self._end if self._end % total + size <= total else -(-self._end // total) * total
                if not self._taken or start + size - self._first <= total:
                    break
                if self._given:
                    self._given[0].synchronize()
                else:
                    self._changed.wait()
            if self._broken:
                return None
            self._first = self._first if self._taken else start
            self._end = start + size
            self._taken.append(self._end)
            return self._memory[start % total :][:size]

    def give_back(self, event: Any) -> None:
        """Give back what was taken first; it is free after ``event``, at once if that is ``None``."""
        with self._changed:
            self._given.append(event)
            self._changed.notify_all()

    def give_up(self) -> None:
        """Note that taken memory will never come back: the network may still write there."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()


@dataclass
class Parcel:
    """An exchange, or a window of one, on its way between a device and the network.

    ``rows``: what is sent, in the order in which it is copied into page-locked memory. ``arriving``: shape of what
    arrives, of the same dtype. ``post`` and ``send`` are handed the addresses of what arrives and of what is sent.
    ``bring`` is handed bool[N, units], those that arrived, and the data, and copies them to the device. ``patience``:
    seconds for a live process that sends nothing.
    """

    rows: Sequence[torch.Tensor]
    arriving: torch.Size
    post: Callable[[int], Message]
    send: Callable[[int], None]
    bring: Callable[[np.ndarray, torch.Tensor], None]
    patience: float
    made: Any = None
    transfer: Message | None = None
    arrived: torch.Tensor | None = None
    ring: Ring | None = None
    #: Done when all is handed to the network; and when all has arrived, with an event after its copy.
    gone: Future[None] = field(default_factory=Future)
    done: Future[Any] = field(default_factory=Future)

    def wait(self) -> None:
        """Wait until all has arrived; the current stream waits for the copy. Raise :class:`PeerLost`."""
        event = self.done.result()
        if event is not None:
            event.wait()

    def forget(self) -> None:
        """Release all buffers: a kept parcel is only asked for its result."""
        self.rows, self.arrived = (), None
        self.post = self.send = self.bring = lambda *_: None


@dataclass(eq=False)
class Crossing:
    """An exchange. Its wait ends when nothing more will arrive and all units were sent.

    ``near``: handles of the collectives on this node. ``parts``: its windows, as messages. ``patience``: seconds for a
    live process that sends nothing.
    """

    near: list[Any]
    parts: Sequence[Message | Parcel]
    patience: float
    _reports: dict[int, np.ndarray] = field(default_factory=dict)

    def wait(self) -> None:
        """Wait for the exchange. Raise :class:`PeerLost`, also if a live process has sent nothing for a while."""
        while self.near:  # they hold buffers
            self.near.pop(0).wait()
        for part in self.parts:
            if isinstance(part, Parcel):
                part.wait()
            else:
                part.finish(self.patience)

    @property
    def _transfers(self) -> list[Any]:
        return [part.transfer if isinstance(part, Parcel) else part for part in self.parts]

    def arrived(self) -> np.ndarray:
        """Return bool[N, count]: the units that arrived, after :meth:`wait`."""
        return np.concatenate([transfer.arrived for transfer in self._transfers], axis=1)

    def reports(self) -> np.ndarray | None:
        """Return bool[N, count]: the sent units that did not arrive; ``None`` while a report is missing."""
        for number, transfer in enumerate(self._transfers):
            if number not in self._reports:
                lost = None if transfer is None else transfer.reports()
                if lost is None:
                    return None
                self._reports[number] = lost
        return np.concatenate([self._reports[number] for number in range(len(self.parts))], axis=1)

    def leave(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the network has all data: others may still want them."""
        wait([part.gone for part in self.parts if isinstance(part, Parcel)], seconds)


class Courier:
    """Carries parcels of one device, in order, with at most ``memory`` bytes under way. It has two threads."""

    def __init__(self, device: torch.device, memory: int) -> None:
        self._device, self._memory = device, memory
        if device.type == "cuda":
            _streams(device)  # before two threads ask for them
        self._ring: Ring | None = None
        self._leaving: SimpleQueue[Parcel] = SimpleQueue()
        self._arriving: SimpleQueue[Parcel] = SimpleQueue()
        for name, queue, act in (("down", self._leaving, self._leave), ("up", self._arriving, self._arrive)):
            # Daemons: a process that fails must not wait for ranks that are gone.
            threading.Thread(target=self._run, args=(queue, act), name=f"megatron-lossy-{name}", daemon=True).start()

    def carry(self, parcel: Parcel) -> None:
        """Begin to carry ``parcel``, of what the current stream makes."""
        parcel.made = _mark(self._device)
        self._leaving.put(parcel)

    def _run(self, queue: SimpleQueue[Parcel], act: Callable[[Parcel], None]) -> None:
        if self._device.type == "cuda":
            # Else a thread's first call makes a context on device 0, whatever the process uses.
            torch.cuda.set_device(self._device)
        with torch.no_grad():
            while True:
                parcel = queue.get()
                try:
                    act(parcel)
                except BaseException as error:  # the wait for it raises it
                    if parcel.ring is not None:
                        parcel.ring.give_up()
                    for future in (parcel.gone, parcel.done):
                        if not future.done():
                            future.set_exception(error)
                del parcel  # it holds buffers

    def _leave(self, parcel: Parcel) -> None:
        dtype = parcel.rows[0].dtype
        sizes = [row.numel() * dtype.itemsize for row in parcel.rows]
        start = -(-sum(sizes) // _ALIGNMENT) * _ALIGNMENT
        memory = self._take(parcel, start + parcel.arriving.numel() * dtype.itemsize)
        parcel.arrived = memory[start:].view(dtype)[: parcel.arriving.numel()].view(parcel.arriving)
        parcel.transfer = parcel.post(parcel.arrived.data_ptr())
        parcel.transfer.keep = memory
        into = memory[: sum(sizes)].split(sizes)
        copies = [part.view(dtype).view(row.shape) for part, row in zip(into, parcel.rows, strict=True)]
        copied = _copy_down(parcel.rows, copies, parcel.made)
        if copied is not None:
            copied.synchronize()
        parcel.send(memory.data_ptr())
        parcel.gone.set_result(None)
        self._arriving.put(parcel)

    def _take(self, parcel: Parcel, size: int) -> torch.Tensor:
        while True:
            if self._ring is None:
                self._ring = Ring(self._memory, self._device.type == "cuda")
            parcel.ring, memory = self._ring, self._ring.take(size)
            if memory is not None:
                return memory
            self._ring = None

    def _arrive(self, parcel: Parcel) -> None:
        assert parcel.transfer is not None and parcel.arrived is not None and parcel.ring is not None
        parcel.transfer.finish(parcel.patience)
        up = torch.cuda.stream(_streams(self._device)[1]) if self._device.type == "cuda" else nullcontext()
        with up:
            parcel.bring(parcel.transfer.arrived, parcel.arrived)
            event = _mark(self._device)
        parcel.ring.give_back(event)
        parcel.forget()
        parcel.done.set_result(event)


@functools.cache
def courier_of(device: torch.device, memory: int) -> Courier:
    """Return the courier of this process for ``device``, with so many bytes of page-locked memory."""
    return Courier(device, memory)


os.register_at_fork(after_in_child=courier_of.cache_clear)  # a child has none of its threads
