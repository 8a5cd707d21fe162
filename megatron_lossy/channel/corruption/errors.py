"""The errors of one rank, applied to its gradients bucket by bucket, in any order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...exchange import Exchange, Stream
from .base import Corruption, Event
from .change import AddUp, apply, digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hit:
    """An error as it happened, and the digest of the bucket, or of the owner's shard of it, afterwards."""

    event: Event
    digest: bytes


@dataclass(frozen=True)
class Reduction:
    """The errors in the gradients of ``rank`` in one reduction of ``stream``.

    ``sizes``: for each bucket the number of elements that an error could hit, each of ``width`` bits. ``hits``: in
    canonical order. ``spared``: buckets that a relative error left unchanged, because their gradient is zero or not
    finite.
    """

    stream: Stream
    rank: int
    sizes: tuple[int, ...]
    width: int
    hits: tuple[Hit, ...] = ()
    spared: tuple[int, ...] = ()


class Errors:
    """Applies errors to the gradients of ``rank`` in one stream.

    ``ranges``: for each bucket int64[k, 2], the first and last + 1 of each run of elements without padding. ``width``:
    bits of an element. ``records``: whether digests are wanted. ``add_up``: see :func:`apply`.
    """

    def __init__(
        self,
        corruption: Corruption,
        rank: int,
        ranges: Sequence[np.ndarray],
        width: int,
        records: bool = False,
        add_up: AddUp | None = None,
    ) -> None:
        self._corruption = corruption
        self._rank = rank
        self._ranges = [[(int(first), int(last)) for first, last in runs] for runs in ranges]
        self._sizes = [sum(last - first for first, last in runs) for runs in self._ranges]
        self._width = width
        self._records = records
        self._add_up = add_up
        self._reduced: Exchange | None = None
        self._told = False
        self._events: dict[int, Event] = {}
        self._hits: dict[int, Hit] = {}
        self._spared: set[int] = set()

    def hit(
        self, exchange: Exchange, bucket: int, buffer: torch.Tensor, unit: Callable[[], float] = lambda: 1.0
    ) -> None:
        """Apply the errors of ``exchange`` to ``buffer``, the reduced gradient of ``bucket``.

        ``unit()``: see :func:`apply`. It is called only if an error happens, because a loss scale is on the device.
        """
        if exchange != self._reduced:
            self._reduced, self._told = exchange, False
            drawn = self._corruption.events(exchange, self._rank, self._sizes, self._width)
            self._events = {event.bucket: event for event in drawn}
            self._hits, self._spared = {}, set()
        event = self._events.get(bucket)
        if event is None:
            return
        happened = apply(buffer, event, unit(), self._ranges[bucket], self._add_up)
        if happened is None:
            self._spared.add(bucket)
            return
        left = digest(buffer) if self._records or event.digest else b""
        if event.digest not in (b"", left):
            self._corruption.differs(event)
        self._hits[bucket] = Hit(happened, left)

    def take(self, step: int) -> list[Reduction]:
        """Returns the errors of ``step``, once; nothing if gradients were not reduced."""
        if self._reduced is None or self._reduced.step != step or self._told:
            return []
        self._told = True
        hits = tuple(self._hits[bucket] for bucket in sorted(self._hits))
        stream, sizes = self._reduced.stream, tuple(self._sizes)
        return [Reduction(stream, self._rank, sizes, self._width, hits, tuple(sorted(self._spared)))]
