"""Cutting buckets into units of loss (docs/semantics.md, Unit of loss).

A bucket is a flat buffer of N equal shards. A unit is a run of elements of one shard; the same cut applies to
every shard. Units are numbered over all buckets of a stream in canonical order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import refuse


@dataclass(frozen=True)
class BucketUnits:
    """How the shards of one bucket are cut.

    ``first`` and ``count``: numbers of the bucket's units among those of the stream. ``shard``: elements of a shard.
    ``elements``: elements of a unit; the last one of a shard may be shorter.
    """

    first: int
    count: int
    shard: int
    elements: int

    @property
    def whole(self) -> int:
        """Number of units that are not cut short."""
        return self.shard // self.elements

    @property
    def tail(self) -> int:
        """Elements of the shorter last unit; 0 if there is none."""
        return self.shard - self.whole * self.elements

    @property
    def parts(self) -> list[tuple[slice, int]]:
        """The bucket's units that are equally long, as numbers counted from ``first``, and their elements."""
        result = [(slice(0, self.whole), self.elements)] if self.whole else []
        return result + ([(slice(self.whole, self.whole + 1), self.tail)] if self.tail else [])

    @property
    def numbers(self) -> slice:
        """The bucket's units among those of the stream."""
        return slice(self.first, self.first + self.count)


def cut(shards: Sequence[int], itemsizes: Sequence[int], unit: str, packet_bytes: int) -> tuple[list[BucketUnits], int]:
    """Cut buckets whose shards have ``shards[k]`` elements of ``itemsizes[k]`` bytes on the wire.

    Returns the cut of every bucket and the number of units of the stream. Raises :class:`UsageError` if a packet is
    smaller than one element.
    """
    if unit == "packet":
        cuts, first = [], 0
        for shard, itemsize in zip(shards, itemsizes, strict=True):
            elements = packet_bytes // itemsize
            if not elements:
                raise refuse("--packet-bytes", packet_bytes, f"must hold at least one element of {itemsize} bytes")
            count = -(-shard // elements)
            cuts.append(BucketUnits(first, count, shard, min(elements, shard)))
            first += count
        return cuts, first
    if unit == "bucket":
        return [BucketUnits(k, 1, shard, shard) for k, shard in enumerate(shards)], len(shards)
    assert unit == "shard"
    return [BucketUnits(0, 1, shard, shard) for shard in shards], 1


def units_of(cut: Sequence[BucketUnits]) -> int:
    """Units per link and step of a stream whose buckets are cut as ``cut``."""
    return max((bucket.first + bucket.count for bucket in cut), default=0)
