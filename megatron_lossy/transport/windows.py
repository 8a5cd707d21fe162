"""Windows: parts of a bucket that cross one after another, and the copies of what arrived in one to a device.

A window is a run of units, the same of every shard. It crosses as a message of its own, so that page-locked memory need
not hold a whole bucket twice. Kernels and copies of a window depend neither on the number of packets nor on that of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..base.errors import refuse
from ..base.exchange import BucketUnits, Lost
from ..config.transport import UDP_WINDOWS
from ..recovery.rows import IndexedRows, to_device, unit_views, used_here

#: A datagram has 16 bits for the number of a window.
_NUMBERS = 2**16


@dataclass(frozen=True)
class Window:
    """A part of a bucket that crosses by itself.

    ``number``: among the windows of its phase. ``units``: those of the bucket. ``start``, ``elements``: of each shard.
    """

    number: int
    units: slice
    start: int
    elements: int

    @property
    def part(self) -> slice:
        """The elements of each shard."""
        return slice(self.start, self.start + self.elements)


def windows(
    cut: Sequence[BucketUnits], dtypes: Sequence[torch.dtype], size: int, memory: int
) -> Iterator[list[Window]]:
    """Cut each bucket into windows of which several fit ``memory``, with what is sent and what arrives.

    Raise :class:`UsageError` if a packet of each rank does not fit, or if there are too many windows.
    """
    number = 0
    for units, dtype in zip(cut, dtypes, strict=True):
        least = 2 * size * units.elements * dtype.itemsize * UDP_WINDOWS
        if memory < least:
            raise refuse("--udp-memory", memory, f"must be at least {least}: room for packets of each of {size} ranks")
        wanted = 2 * size * units.shard * dtype.itemsize * UDP_WINDOWS
        step = -(-units.count // min(units.count, -(-wanted // memory)))
        found = []
        for first in range(0, units.count, step):
            stop, start = min(first + step, units.count), first * units.elements
            elements = min(stop * units.elements, units.shard) - start
            found.append(Window(number + len(found), slice(first, stop), start, elements))
        number += len(found)
        if number > _NUMBERS:
            raise refuse("--udp-memory", memory, f"cuts the buckets into more than {_NUMBERS} windows; give more")
        yield found


def runs(ranks: Sequence[int]) -> list[tuple[slice, slice]]:
    """Return runs of consecutive ``ranks``: their ranks, and their places in ``ranks``. One copy serves a run."""
    starts = [place for place, rank in enumerate(ranks) if not place or rank != ranks[place - 1] + 1]
    ends = [*starts[1:], len(ranks)][: len(starts)]
    return [(slice(ranks[a], ranks[b - 1] + 1), slice(a, b)) for a, b in zip(starts, ends, strict=True)]


#: Copies the data of a window, [sources, its elements] in page-locked memory, of which bool[sources, units] arrived.
Bring = Callable[[Window, np.ndarray, torch.Tensor], None]


def into_pieces(pieces: torch.Tensor, size: int, sources: Sequence[int]) -> Bring:
    """Return a function that copies all data from ``sources`` into ``pieces`` [N * shard], with any lost values."""

    def bring(window: Window, arrived: np.ndarray, data: torch.Tensor) -> None:
        used_here((pieces,))
        for group, places in runs(sources):
            pieces.view(size, -1)[group, window.part].copy_(data[places], non_blocking=True)

    return bring


def into_replica(
    replica: torch.Tensor, size: int, sources: Sequence[int], units: BucketUnits, rows: IndexedRows
) -> Bring:
    """Return a function that copies units that arrived from ``sources`` into ``replica`` [N * shard], and no others."""

    def bring(window: Window, arrived: np.ndarray, data: torch.Tensor) -> None:
        used_here((replica,))
        whole = rows.nothing(Lost(~arrived))
        if not whole:
            data = data.to(replica.device, non_blocking=True)
            mask = to_device(np.ascontiguousarray(arrived), replica.device)
        for group, places in runs(sources):
            mine = replica.view(size, -1)[group]
            if whole:
                mine[:, window.part].copy_(data[places], non_blocking=True)
            else:
                _write_arrived(mine, data[places], mask[places], units, window)

    return bring


def _write_arrived(
    shards: torch.Tensor, data: torch.Tensor, arrived: torch.Tensor, units: BucketUnits, window: Window
) -> None:
    """Write the units that ``arrived`` bool[R, count of the window] from ``data`` [R, its elements] into ``shards``."""
    first, stop = window.units.start, window.units.stop
    for view, numbers in unit_views(shards.view(-1), units):
        start, end = max(first, numbers.start), min(stop, numbers.stop)
        if start < end:
            old = view[:, start - numbers.start : end - numbers.start]
            place = start * units.elements - window.start
            new = data[:, place : place + old[0].numel()].unflatten(1, old.shape[1:])
            torch.where(arrived[:, start - first : end - first, None], new, old, out=old)
