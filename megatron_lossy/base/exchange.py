"""Names of exchanges, units of loss, and the result of an exchange. Pure: NumPy only.

A bucket is a flat buffer of N equal shards. A unit is a run of elements of one shard; the same cut applies to every
shard. Units are numbered over all buckets of a stream in canonical order (docs/semantics.md, Unit of loss).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from .errors import refuse

KINDS = ("dense", "expert", "embedding", "boundary", "islands")
_NAME = re.compile(r"([a-z]+)-e(\d+)-s(\d+)-c(\d+)(?:-t(\d+))?")


@dataclass(frozen=True)
class Stream:
    """The group of buckets that one exchange carries.

    Drawn losses are the same for all ranks of tensor parallelism, and for all copies of a tied embedding: their stream
    is ``Stream("embedding")``, without a stage. A network loses different units for each of them. There ``tensor`` is
    the tensor-parallel rank, and a tied embedding has its stage.

    Between islands, ``expert_rank`` is the data-parallel rank within its island: it exchanges its own shard. Between sites
    it also counts the places within a site: the place of a rank, added to its expert rank times the ranks of a site.

    At a boundary between pipeline stages, ``stage`` and ``chunk`` are those of the later stage, in both directions, and
    ``expert_rank`` is the data-parallel rank.

    In models of FSDP2 and DDP ``stage`` is the number of the model in its process.
    """

    kind: str = "dense"
    expert_rank: int = 0
    stage: int = 0
    chunk: int = 0
    tensor: int | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS
        assert all(0 <= value < 2**16 for value in (self.expert_rank, self.stage, self.chunk))

    @property
    def name(self) -> str:
        """A readable name, also the suffix of arrays in a trace: ``dense-e0-s0-c0``, with a tensor rank ``…-t1``."""
        tensor = "" if self.tensor is None else f"-t{self.tensor}"
        return f"{self.kind}-e{self.expert_rank}-s{self.stage}-c{self.chunk}{tensor}"

    @cached_property
    def drawn(self) -> Stream:
        """The stream that losses of the same buckets are drawn by."""
        alike = Stream("embedding", self.expert_rank) if self.kind == "embedding" else self
        return replace(alike, tensor=None)

    @classmethod
    def parse(cls, name: str) -> Stream:
        """Return the inverse of :attr:`name`. Raise ``ValueError``."""
        found = _NAME.fullmatch(name)
        if found is None or found[1] not in KINDS:
            raise ValueError(f"{name!r} is no stream")
        tensor = None if found[5] is None else int(found[5])
        return cls(found[1], int(found[2]), int(found[3]), int(found[4]), tensor)


@dataclass(frozen=True)
class Exchange:
    """One exchange: its phase, its stream, and the step that its draws are keyed by.

    Phases are ``grad`` and ``param``; at boundaries between pipeline stages ``act`` and ``act-grad``; between islands
    ``sync-reduce`` and ``sync-gather``, whose ranks are the islands.
    """

    phase: str
    stream: Stream
    step: int


@dataclass(frozen=True)
class BucketUnits:
    """The cut of one bucket's shards into units.

    ``first`` and ``count``: numbers of the bucket's units among those of the stream. ``shard``: elements of a shard.
    ``elements``: elements of a unit; the last one of a shard may be shorter.
    """

    first: int
    count: int
    shard: int
    elements: int

    @cached_property
    def whole(self) -> int:
        """Number of units that are not cut short."""
        return self.shard // self.elements

    @cached_property
    def tail(self) -> int:
        """Elements of the shorter last unit; 0 if there is none."""
        return self.shard - self.whole * self.elements

    @cached_property
    def parts(self) -> list[tuple[slice, int]]:
        """Runs of equally long units: the numbers of the units, from 0 in this bucket, and the elements of each."""
        result = [(slice(0, self.whole), self.elements)] if self.whole else []
        return result + ([(slice(self.whole, self.whole + 1), self.tail)] if self.tail else [])

    @cached_property
    def numbers(self) -> slice:
        """The bucket's units among those of the stream."""
        return slice(self.first, self.first + self.count)


def cut(
    shards: Sequence[int],
    itemsizes: Sequence[int],
    unit: str,
    packet_bytes: int,
    elements: Sequence[int | None] = (),
) -> tuple[list[BucketUnits], int]:
    """Cut buckets whose shards have ``shards[k]`` elements of ``itemsizes[k]`` bytes on the wire.

    ``elements``: those of a packet of each bucket, where a code decides; ``None``: as many as fit.

    Return the cut of every bucket and the number of units of the stream. Raise :class:`UsageError` if a packet is
    smaller than one element.
    """
    if unit == "packet":
        cuts, first = [], 0
        for shard, itemsize, coded in zip(shards, itemsizes, elements or [None] * len(shards), strict=True):
            packet = packet_bytes // itemsize if coded is None else coded
            if not packet:
                raise refuse("--packet-bytes", packet_bytes, f"must hold at least one element of {itemsize} bytes")
            count = -(-shard // packet)
            cuts.append(BucketUnits(first, count, shard, min(packet, shard)))
            first += count
        return cuts, first
    if unit == "bucket":
        return [BucketUnits(k, 1, shard, shard) for k, shard in enumerate(shards)], len(shards)
    assert unit == "shard"
    return [BucketUnits(0, 1, shard, shard) for shard in shards], 1


def units_of(cut: Sequence[BucketUnits]) -> int:
    """Return units per link and step of a stream whose buckets are cut as ``cut``."""
    return max((bucket.first + bucket.count for bucket in cut), default=0)


class Lost:
    """The lost units: ``mask`` bool[shards, count]. Their places are worked out once, at the first request.

    ``spared``: a tensor bool[shards, count] on the device of the data, of units that arrive after all, which the host
    need not have yet; ``None``: no unit of ``mask``.
    """

    def __init__(self, mask: np.ndarray, spared: Any = None) -> None:
        self.mask, self.spared = mask, spared
        self._places: dict[tuple[int, int], np.ndarray] = {}

    def places(self, numbers: slice) -> np.ndarray:
        """Return int32[2, k]: each lost unit's shard, and its number from ``numbers.start``, for ``numbers``."""
        key = (numbers.start, numbers.stop)
        if key not in self._places:
            self._places[key] = np.array(np.nonzero(self.mask[:, numbers]), dtype=np.int32)
        return self._places[key]


@dataclass(frozen=True)
class Delivery:
    """The units that arrived in one exchange: at one rank in a real run, at all ranks in a virtual cluster.

    ``sources`` [S] and ``receivers`` [R] are ranks in the full group. ``arrived`` bool[R, S, units] includes each
    rank's own shard. ``cut`` holds the units of every bucket: their numbers and their elements; with ``--loss-unit
    shard`` all buckets share unit 0. ``outbound`` is :attr:`sent`, or a function that draws it. In phase ``param`` a
    unit that did not arrive is stale from now on.
    """

    exchange: Exchange
    sources: Sequence[int]
    receivers: Sequence[int]
    arrived: np.ndarray
    cut: Sequence[BucketUnits]
    outbound: np.ndarray | Callable[[], np.ndarray] | None = None
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def crossing(self) -> np.ndarray:
        """bool[R, S]: True for links between two ranks, False for the link of a rank to itself."""
        return np.array(self.receivers)[:, None] != np.array(self.sources)

    @cached_property
    def sent(self) -> np.ndarray | None:
        """bool[S, units]: the units of the one receiver's data that arrived at each rank; known for gradients only."""
        return self.outbound() if callable(self.outbound) else self.outbound

    def incoming(self, units: BucketUnits) -> np.ndarray:
        """Return bool[S, count]: the units of a bucket, cut into ``units``, that arrived at the receiver, by source."""
        assert len(self.arrived) == 1
        return self.arrived[0][:, units.numbers]

    def lost_here(self, units: BucketUnits) -> Lost:
        """Return the units of the bucket that did not arrive at the one receiver, by source."""
        key = "here", units.first, units.count
        return self._known.get(key) or self._known.setdefault(key, Lost(~self.incoming(units)))

    def lost_there(self, units: BucketUnits) -> Lost:
        """Return the units of the one receiver's bucket that did not arrive, by destination.

        Raise ``ValueError`` if they are not known.
        """
        if self.sent is None:
            raise ValueError(f"{self.exchange}: no report of this rank's data that arrived")
        key = "there", units.first, units.count
        return self._known.get(key) or self._known.setdefault(key, Lost(~self.sent[:, units.numbers]))

    def survivors(self, units: BucketUnits) -> np.ndarray:
        """Return int[count]: the number of sources whose unit arrived at the one receiver, for each unit."""
        key = "survivors", units.first, units.count
        if key not in self._known:
            self._known[key] = self.incoming(units).sum(axis=0)
        return self._known[key]
