"""The main weights of an island as one vector, wherever its optimizer keeps them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...hooks.main_weights import main_pieces
from .places import Part, Places


@dataclass(frozen=True)
class Segment:
    """Elements from ``start`` on: ``main`` float32[n], and its ``rounded`` copy [n] in the model.

    ``rounded`` is ``None`` if the model computes with ``main`` itself.
    """

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
        self._known: tuple[Places | None, list[tuple[Segment, Part]]] = (None, [])

    def read(self, places: Places | None) -> torch.Tensor:
        """A copy [k] of the elements at ``places``; ``None``: all."""
        result = torch.zeros(self.size if places is None else len(places), device=self._device)
        for segment, part in self._parts(places):
            part.read(segment.main, result)
        return result

    def write(self, places: Places | None, values: torch.Tensor) -> None:
        """Write ``values`` [k] to the elements at ``places``; ``None``: all."""
        for segment, part in self._parts(places):
            part.write(segment.main, values)
            if segment.rounded is not None:
                part.write(segment.rounded, values)

    def _parts(self, places: Places | None) -> list[tuple[Segment, Part]]:
        if places is None:
            return [(one, Part(slice(one.start, one.stop), 0, 1, None)) for one in self._segments]
        if places is not self._known[0]:  # the same are read, changed and written
            stretches = [(one.start, one.stop) for one in self._segments]
            self._known = (places, [(self._segments[number], part) for number, part in places.parts(stretches)])
        return self._known[1]


def shard_vector(
    optimizers: Sequence[Any],
    buckets: Sequence[Any],
    weights: Sequence[torch.Tensor],
    shard: int,
    shards: int,
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
            pieces = main_pieces(optimizers, bucket, bucket.param_data, "--islands")
            for start, main in sorted(pieces, key=lambda piece: piece[0]):
                low, high = max(start, first), min(start + main.numel(), first + elements)
                if low < high:
                    own = main.view(-1)[low - start : high - start]
                    segments.append(Segment(base + low - first, own, kept[low:high]))
        base += elements
    return Vector(segments, base, weights[0].device)
