"""The errors of one rank: what hits its gradients, bucket by bucket, in any order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...exchange import Exchange
from .base import Corruption, Event
from .change import AddUp, apply, digest

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Hit:
    """An error as it happened, and the digest of the bucket, or of the owner's shard of it, afterwards."""

    event: Event
    digest: bytes


class Errors:
    """What hits the gradients of ``rank`` in one stream.

    ``ranges``: of each bucket int64[k, 2], the first and last + 1 of each run of elements that are no padding. ``width``: bits
    of an element. ``records``: whether digests are wanted. ``add_up``: see :func:`apply`.
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
        self._step: int | None = None
        self._events: dict[int, Event] = {}
        self._hits: dict[int, Hit] = {}

    def hit(self, exchange: Exchange, bucket: int, buffer: torch.Tensor, unit: float = 1.0) -> None:
        """Do to ``buffer``, the reduced gradient of ``bucket``, what happens in ``exchange``. ``unit``: see :func:`apply`."""
        if exchange.step != self._step:
            self._step = exchange.step
            drawn = self._corruption.events(exchange, self._rank, self._sizes, self._width)
            self._events = {event.bucket: event for event in drawn}
            self._hits = {}
        event = self._events.get(bucket)
        happened = None if event is None else apply(buffer, event, unit, self._ranges[bucket], self._add_up)
        if happened is not None:
            self._hits[bucket] = Hit(happened, digest(buffer) if self._records else b"")

    def take(self, step: int) -> list[Hit]:
        """What has happened in ``step``, in canonical order, once."""
        hits, self._hits = self._hits, {}
        return [hits[bucket] for bucket in sorted(hits)] if step == self._step else []
