"""Order over streams: which reads and writes of device memory nothing keeps apart, and blocks that are freed in use.

Each stream has a vector clock: how much of every stream's work is certainly over when its next work begins. A recorded
event keeps the clock of its stream; a stream that waits for the event takes it over. The host has one too: what it waited for
is over before all that it asks for later. Two accesses of which one writes are a race unless the later stream's clock has
the earlier access in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

from .places import Place

Clock = dict[int, int]
#: (block, first byte, byte after the last)
Range = tuple[int, int, int]


class Access(NamedTuple):
    """Bytes of a block that an operator touched as number ``time`` of ``stream``."""

    first: int
    end: int
    stream: int
    time: int
    place: Place
    operator: str


class Block:
    """A block of device memory. ``stream``: the one that allocated it; ``announced``: those of ``record_stream``."""

    def __init__(self, stream: int, place: Place | None) -> None:
        self.stream = stream
        self.place = place
        self.writes: list[Access] = []
        self.reads: list[Access] = []
        self.announced: set[int] = set()
        self.last: dict[int, Access] = {}  # by other streams


def _join(into: Clock, other: Clock) -> None:
    for stream, time in other.items():
        if into.get(stream, 0) < time:
            into[stream] = time


class Order:
    """The established order of device work."""

    def __init__(self) -> None:
        self.races: Counter[str] = Counter()
        self.freed_in_use: Counter[str] = Counter()
        self._clocks: defaultdict[int, Clock] = defaultdict(dict)
        self._host: Clock = {}
        self._host_version = 0
        self._taken: dict[int, int] = {}  # the version of the host's clock that a stream has
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, Block] = {}

    # Memory.

    def made(self, block: int, stream: int, place: Place) -> None:
        """Note a new block, allocated on ``stream``."""
        self._blocks[block] = Block(stream, place)

    def announced(self, block: int, stream: int) -> None:
        """Note a ``record_stream``."""
        if block in self._blocks:
            self._blocks[block].announced.add(stream)

    def freed(self, block: int) -> None:
        """Judge a block that was freed: torch gives its memory to the next who asks on the stream that allocated it."""
        one = self._blocks.pop(block, None)
        if one is None:
            return
        over = dict(self._clocks[one.stream])
        for stream in one.announced:  # torch waits for these, and so for all that they wait for
            _join(over, self._clocks[stream])
        _join(over, self._host)
        for stream, access in one.last.items():
            if over.get(stream, 0) < access.time:
                text = f"allocated at {one.place}, last used by {access.operator} at {access.place} on another stream"
                self.freed_in_use[text] += 1

    # Streams, events, the host.

    def recorded(self, event: int, stream: int) -> None:
        """Note that ``event`` stands for the work of ``stream`` so far."""
        clock = dict(self._clocks[stream])
        _join(clock, self._host)
        self._events[event] = clock

    def waited(self, event: int, stream: int) -> None:
        """Note that later work of ``stream`` waits for ``event``."""
        _join(self._clocks[stream], self._events.get(event, {}))

    def host_waited(self, clock: Clock) -> None:
        """Note that the host waited for everything in ``clock``."""
        _join(self._host, clock)
        self._host_version += 1

    def of_event(self, event: int) -> Clock:
        """Return the clock of a recorded event."""
        return self._events.get(event, {})

    def of_stream(self, stream: int) -> Clock:
        """Return the clock of a stream."""
        return self._clocks[stream]

    def of_everything(self) -> Clock:
        """Return the clock of a device that has nothing left to do."""
        clock: Clock = {}
        for one in self._clocks.values():
            _join(clock, one)
        return clock

    def host_has(self, clock: Clock) -> bool:
        """Return whether the host has waited for all of ``clock``."""
        return all(self._host.get(stream, 0) >= time for stream, time in clock.items())

    # Work.

    def worked(
        self, stream: int, reads: list[Range], writes: list[Range], place: Place, operator: str
    ) -> tuple[int, int]:
        """Note an operator on ``stream``, and judge what it touches. Return (stream, its number there)."""
        clock = self._clocks[stream]
        if self._taken.get(stream) != self._host_version:
            _join(clock, self._host)
            self._taken[stream] = self._host_version
        time = clock[stream] = clock.get(stream, 0) + 1
        for block, first, end in reads:
            self._touch(block, Access(first, end, stream, time, place, operator), False, clock)
        for block, first, end in writes:
            self._touch(block, Access(first, end, stream, time, place, operator), True, clock)
        return stream, time

    def _touch(self, number: int, access: Access, writes: bool, clock: Clock) -> None:
        block = self._blocks.get(number)
        if block is None:  # from before somebody watched
            block = self._blocks[number] = Block(access.stream, None)
        if access.stream != block.stream:
            block.last[access.stream] = access
        for earlier in block.writes:
            self._judge(earlier, access, clock, "written and written" if writes else "written and read")
        if writes:
            for earlier in block.reads:
                self._judge(earlier, access, clock, "read and written")
            block.writes = [one for one in block.writes if not _covers(access, one)] + [access]
            block.reads = [one for one in block.reads if not _covers(access, one)]
        else:
            block.reads = [one for one in block.reads if one.stream != access.stream or not _covers(access, one)]
            block.reads.append(access)

    def _judge(self, earlier: Access, later: Access, clock: Clock, what: str) -> None:
        if earlier.stream == later.stream or earlier.end <= later.first or later.end <= earlier.first:
            return
        if clock.get(earlier.stream, 0) < earlier.time:
            text = (
                f"{what} without order: {earlier.operator} at {earlier.place}, then {later.operator} at {later.place}"
            )
            self.races[text] += 1


def _covers(outer: Access, inner: Access) -> bool:
    return outer.first <= inner.first and inner.end <= outer.end
