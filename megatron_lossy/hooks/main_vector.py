"""The main weights of an island as one vector, wherever its optimizer has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from .main_weights import main_pieces


@dataclass(frozen=True)
class Segment:
    """Elements from ``start`` on: ``main`` float32[n], and the rounded copy [n] that is computed with, if it is another."""

    start: int
    main: torch.Tensor
    rounded: torch.Tensor | None

    @property
    def stop(self) -> int:
        """The element after the last one."""
        return self.start + self.main.numel()


class _Part(NamedTuple):
    """Rows of ``width`` consecutive elements of a segment, and where these are in what is read or written.

    ``where``: of them in that. ``offset``: of row 0 in the segment. ``rows`` int64[n]; ``None``: all.
    """

    segment: Segment
    where: slice
    offset: int
    width: int
    rows: torch.Tensor | None

    def of(self, weights: torch.Tensor) -> torch.Tensor:
        """``weights`` of the segment as rows; rows of one element as they are, which is faster."""
        if self.width == 1:
            return weights
        count = (weights.numel() - self.offset) // self.width
        return weights[self.offset : self.offset + count * self.width].view(count, self.width)


class Vector:
    """``size`` elements in segments; between these is padding, which reads as zeros and cannot be written.

    ``block``: elements are asked for in whole blocks of so many from a multiple of it on, but for the last one.
    """

    def __init__(self, segments: Sequence[Segment], size: int, device: torch.device, block: int = 1) -> None:
        self._segments, self.size, self._device, self._block = segments, size, device, block
        self._known: tuple[torch.Tensor | None, list[_Part]] = (None, [])

    def read(self, places: torch.Tensor | None) -> torch.Tensor:
        """A copy [k] of the elements ``places`` int64[k], rising; ``None``: all."""
        result = torch.zeros(self.size if places is None else len(places), device=self._device)
        for part in self._parts(places):
            if part.rows is None:
                result[part.where] = part.segment.main
            else:  # faster than brackets
                weights = part.of(part.segment.main)
                out = result[part.where].view(len(part.rows), *weights.shape[1:])
                torch.index_select(weights, 0, part.rows, out=out)
        return result

    def write(self, places: torch.Tensor | None, values: torch.Tensor) -> None:
        """Put ``values`` [k] there."""
        for part in self._parts(places):
            main, rounded = part.segment.main, part.segment.rounded
            for weights in (main,) if rounded is None else (main, rounded):
                new = values[part.where].to(weights.dtype)
                if part.rows is None:
                    weights.copy_(new)
                else:
                    rows = part.of(weights)
                    rows.index_copy_(0, part.rows, new.view(len(part.rows), *rows.shape[1:]))

    def _parts(self, places: torch.Tensor | None) -> list[_Part]:
        if places is None:
            return [_Part(one, slice(one.start, one.stop), 0, 1, None) for one in self._segments]
        if places is not self._known[0]:  # the same are read, changed and written
            self._known = (places, list(self._found(places)))
        return self._known[1]

    def _found(self, places: torch.Tensor) -> Iterator[_Part]:
        block = self._block
        edges = []
        for one in self._segments:  # whole blocks are between low and high
            low, high = -(-one.start // block) * block, one.stop // block * block
            edges.append((one.start, low, high, one.stop) if low <= high else (one.start, one.stop, one.stop, one.stop))
        bounds = torch.searchsorted(places, torch.tensor(edges, device=places.device)).tolist()
        for one, (_, low, _, _), (first, second, third, last) in zip(self._segments, edges, bounds, strict=True):
            for begin, end, width in ((first, second, 1), (second, third, block), (third, last, 1)):
                if end > begin:
                    offset = low - one.start if width > 1 else 0
                    rows = places[begin:end:width] - (one.start + offset)
                    yield _Part(one, slice(begin, end), offset, width, rows // width if width > 1 else rows)


def shard_vector(
    optimizers: Sequence[Any],
    buckets: Sequence[Any],
    weights: Sequence[torch.Tensor],
    shard: int,
    shards: int,
    block: int = 1,
) -> Vector:
    """Shard number ``shard`` of ``shards`` of every bucket, one after another, as ``optimizers`` have it.

    ``weights``: the buckets' parameters as they are kept, [shards * elements] each. ``block``: see :class:`Vector`.
    """
    segments: list[Segment] = []
    base = 0
    for bucket, kept in zip(buckets, weights, strict=True):
        elements = kept.numel() // shards
        first = shard * elements
        if kept.dtype == torch.float32:
            segments.append(Segment(base, kept[first : first + elements], None))
        else:
            for start, main in sorted(main_pieces(optimizers, bucket, bucket.param_data), key=lambda piece: piece[0]):
                low, high = max(start, first), min(start + main.numel(), first + elements)
                if low < high:
                    own = main.view(-1)[low - start : high - start]
                    segments.append(Segment(base + low - first, own, kept[low:high]))
        base += elements
    return Vector(segments, base, weights[0].device, block)
