"""The main weights of an island as one vector, wherever its optimizer has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class Vector:
    """``size`` elements in segments; between these is padding, which reads as zeros and cannot be written."""

    def __init__(self, segments: Sequence[Segment], size: int, device: torch.device) -> None:
        self._segments, self.size, self._device = segments, size, device

    def read(self, places: torch.Tensor | None) -> torch.Tensor:
        """A copy [k] of the elements ``places`` int64[k], rising; ``None``: all."""
        result = torch.zeros(self.size if places is None else len(places), device=self._device)
        for segment, part, inner in self._parts(places):
            result[part] = segment.main[inner]
        return result

    def write(self, places: torch.Tensor | None, values: torch.Tensor) -> None:
        """Put ``values`` [k] there."""
        for segment, part, inner in self._parts(places):
            segment.main[inner] = values[part]
            if segment.rounded is not None:
                segment.rounded[inner] = values[part].to(segment.rounded.dtype)

    def _parts(self, places: torch.Tensor | None) -> list[tuple[Segment, slice, Any]]:
        """Each segment with its part of what is read or written, and where that is in the segment."""
        if places is None:
            return [(segment, slice(segment.start, segment.stop), slice(None)) for segment in self._segments]
        edges = torch.tensor([(segment.start, segment.stop) for segment in self._segments], device=places.device)
        bounds = torch.searchsorted(places, edges).tolist()
        return [
            (segment, slice(first, last), places[first:last] - segment.start)
            for segment, (first, last) in zip(self._segments, bounds, strict=True)
            if last > first
        ]


def shard_vector(
    optimizers: Sequence[Any], buckets: Sequence[Any], weights: Sequence[torch.Tensor], shard: int, shards: int
) -> Vector:
    """Shard number ``shard`` of ``shards`` of every bucket, one after another, as ``optimizers`` have it.

    ``weights``: the buckets' parameters as they are kept, [shards * elements] each.
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
    return Vector(segments, base, weights[0].device)
