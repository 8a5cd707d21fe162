"""The elements of a vector that an exchange carries: blocks of consecutive ones, so that few numbers name them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from ...recovery.rows import to_device


class Part(NamedTuple):
    """The chosen elements within a stretch of a vector.

    ``where``: their places among all chosen elements. ``first``: their first place in the stretch. ``rows`` int64[n]:
    the chosen rows of ``width`` elements, counted from ``first``; ``None``: consecutive elements from ``first`` on.
    """

    where: slice
    first: int
    width: int
    rows: torch.Tensor | None

    def read(self, stretch: torch.Tensor, values: torch.Tensor) -> None:
        """Copy the chosen elements of ``stretch`` to their place in ``values`` [k], all chosen elements."""
        out, there = values[self.where], self._of(stretch)
        if self.rows is None:
            out.copy_(there)
        else:  # faster than brackets
            torch.index_select(there, 0, self.rows, out=out.view(len(self.rows), *there.shape[1:]))

    def write(self, stretch: torch.Tensor, values: torch.Tensor) -> None:
        """Copy this part of ``values`` [k] into ``stretch``."""
        new, there = values[self.where].to(stretch.dtype), self._of(stretch)
        if self.rows is None:
            there.copy_(new)
        else:
            there.index_copy_(0, self.rows, new.view(len(self.rows), *there.shape[1:]))

    def _of(self, stretch: torch.Tensor) -> torch.Tensor:
        if self.rows is None:
            return stretch[self.first : self.first + self.where.stop - self.where.start]
        if self.width == 1:  # rows of one element stay as they are, which is faster
            return stretch
        count = (len(stretch) - self.first) // self.width
        return stretch[self.first : self.first + count * self.width].view(count, self.width)


class Places:
    """Elements of a vector of ``size``: ``blocks`` int64[n], rising, of ``width`` elements; the last may be cut."""

    def __init__(self, blocks: np.ndarray, width: int, size: int, device: torch.device) -> None:
        # Blocks are kept twice: here for look-ups, which would wait for the device, and on the device for copies.
        self._blocks, self._rows, self._width, self.size = blocks, to_device(blocks, device), width, size
        self._count = len(blocks) * width
        if len(blocks):
            self._count -= max(0, (int(blocks[-1]) + 1) * width - size)

    def on(self, device: torch.device) -> Places:
        """The same elements, of a vector on ``device``."""
        return self if self._rows.device == device else Places(self._blocks, self._width, self.size, device)

    def __len__(self) -> int:
        return self._count

    def read(self, vector: torch.Tensor) -> torch.Tensor:
        """A copy [k] of these elements of ``vector`` [size]."""
        values = torch.empty(self._count, dtype=vector.dtype, device=vector.device)
        for part in self._whole:
            part.read(vector, values)
        return values

    def write(self, vector: torch.Tensor, values: torch.Tensor) -> None:
        """Put ``values`` [k] at these elements of ``vector``."""
        for part in self._whole:
            part.write(vector, values)

    @cached_property
    def _whole(self) -> list[Part]:
        return [part for _, part in self.parts([(0, self.size)])]

    def parts(self, stretches: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Part]]:
        """The chosen elements of each of ``stretches``, (first, last + 1), with the number of the stretch."""
        width = self._width
        edges = [(start // width, -(-start // width), stop // width, -(-stop // width)) for start, stop in stretches]
        bounds = np.searchsorted(self._blocks, edges).tolist()
        for number, (start, stop) in enumerate(stretches):
            begin, low, high, _ = edges[number]
            first, second, third, last = bounds[number]
            if low > high:  # within one block
                if first < second:
                    yield number, self._run(first, start - begin * width, stop - start, 0)
                continue
            if first < second:
                yield number, self._run(first, start - begin * width, low * width - start, 0)
            if second < third:
                where = slice(second * width, third * width)
                yield number, Part(where, low * width - start, width, self._rows[second:third] - low)
            if third < last:
                yield number, self._run(third, 0, stop - high * width, high * width - start)

    def _run(self, index: int, offset: int, length: int, first: int) -> Part:
        """The part of ``length`` elements of block ``index`` from ``offset`` on, at ``first`` in a stretch."""
        start = index * self._width + offset
        return Part(slice(start, start + length), first, self._width, None)


def read_at(vector: torch.Tensor, places: Places | None) -> torch.Tensor:
    """The elements [k] of ``vector`` at ``places``; with ``None`` the vector itself."""
    return vector if places is None else places.read(vector)


def write_at(vector: torch.Tensor, places: Places | None, values: torch.Tensor) -> None:
    """Put ``values`` [k] at ``places`` of ``vector``; ``None``: everywhere."""
    if places is None:
        vector.copy_(values)
    else:
        places.write(vector, values)
