"""Reading and changing the lost units of a bucket in place.

:class:`IndexedRows` touches only what was lost: its time and memory follow the loss. :class:`MaskedRows` has the
same effect with shapes that do not depend on the loss, for devices that compile a graph per shape (HPU).
Lost values are selected, never multiplied: infinity times zero is not zero.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..exchange import BucketUnits

if TYPE_CHECKING:
    import torch

#: What ``take`` returns: tensors, for each view of the bucket.
Saved = list[tuple[Any, ...]]


def to_tensor(array: np.ndarray, device: torch.device | str = "cpu", non_blocking: bool = True) -> torch.Tensor:
    """``array`` on ``device``; on a CPU it shares the memory."""
    import torch  # takes a second, and flags are checked where it is not installed

    return torch.from_numpy(array).to(device, non_blocking=non_blocking)


def unit_views(buffer: torch.Tensor, units: BucketUnits) -> list[tuple[torch.Tensor, slice]]:
    """``buffer`` [shards * shard] as [shards, units, elements], the shorter last unit apart; with unit numbers."""
    shards = buffer.numel() // units.shard
    start, views = buffer.storage_offset(), []
    if units.whole:
        shape, strides = (shards, units.whole, units.elements), (units.shard, units.elements, 1)
        views.append((buffer.as_strided(shape, strides, start), slice(0, units.whole)))
    if units.tail:
        offset = start + units.whole * units.elements
        shape, strides = (shards, 1, units.tail), (units.shard, units.tail, 1)
        views.append((buffer.as_strided(shape, strides, offset), slice(units.whole, units.whole + 1)))
    return views


class IndexedRows:
    """Work proportional to what was lost."""

    @staticmethod
    def nothing(lost: np.ndarray) -> bool:
        """Whether the work for ``lost`` may be left out, because nothing was lost."""
        return not lost.any()

    @staticmethod
    def _places(lost: np.ndarray, device: torch.device) -> tuple[torch.Tensor, ...]:
        # NumPy's are columns of one array, and to save a column would save them all.
        return tuple(to_tensor(np.ascontiguousarray(index), device) for index in np.nonzero(lost))

    @classmethod
    def zero_(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray) -> None:
        """Set the units where ``lost`` (bool[shards, count]) to zero."""
        for view, numbers in unit_views(buffer, units):
            chosen = lost[:, numbers]
            if units.count == 1:
                for shard in np.flatnonzero(chosen):
                    view[shard].zero_()
            elif chosen.any():
                view.index_put_(cls._places(chosen, buffer.device), view.new_zeros(()))

    @classmethod
    def take(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray) -> Saved:
        """Copies of the units where ``lost``; give them to :meth:`put_` with the same ``lost``."""
        saved: Saved = []
        for view, numbers in unit_views(buffer, units):
            chosen = lost[:, numbers]
            if units.count == 1:
                saved.append(tuple(view[shard].clone() for shard in np.flatnonzero(chosen)))
            elif chosen.any():
                places = cls._places(chosen, buffer.device)
                saved.append((*places, view[places]))
            else:
                saved.append(())
        return saved

    @classmethod
    def put_(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray, saved: Saved) -> None:
        """Write the units that :meth:`take` returned for ``lost``."""
        for (view, numbers), values in zip(unit_views(buffer, units), saved, strict=True):
            if units.count == 1:
                for shard, value in zip(np.flatnonzero(lost[:, numbers]), values, strict=True):
                    view[shard].copy_(value)
            elif values:
                view.index_put_(values[:-1], values[-1])

    @staticmethod
    def scale_(shard: torch.Tensor, units: BucketUnits, factors: np.ndarray) -> None:
        """Multiply each unit of one shard, in place, by its float64 factor; factors of 1 change nothing.

        The product is computed in float32 at least and rounded once to the dtype of ``shard``.
        """
        for view, numbers in unit_views(shard, units):
            values = factors[numbers]
            if len(values) == 1:
                if values[0] != 1:
                    view.mul_(float(values[0]))
            elif (values != 1).any():
                view.mul_(to_tensor(values.astype(np.float32), shard.device)[None, :, None])


class MaskedRows:
    """The same with full-size masks."""

    @staticmethod
    def nothing(lost: np.ndarray) -> bool:
        """See :meth:`IndexedRows.nothing`; never, since a graph that is left out would be another graph."""
        return False

    @staticmethod
    def _mask(lost: np.ndarray, numbers: slice, device: torch.device) -> torch.Tensor:
        return to_tensor(np.ascontiguousarray(lost[:, numbers, None]), device, non_blocking=False)

    @classmethod
    def zero_(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray) -> None:
        """See :meth:`IndexedRows.zero_`."""
        for view, numbers in unit_views(buffer, units):
            view.copy_(view.new_zeros(()).where(cls._mask(lost, numbers, buffer.device), view))

    @classmethod
    def take(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray) -> Saved:
        """See :meth:`IndexedRows.take`; copies everything."""
        return [(view.clone(),) for view, _ in unit_views(buffer, units)]

    @classmethod
    def put_(cls, buffer: torch.Tensor, units: BucketUnits, lost: np.ndarray, saved: Saved) -> None:
        """See :meth:`IndexedRows.put_`."""
        for (view, numbers), (value,) in zip(unit_views(buffer, units), saved, strict=True):
            view.copy_(value.where(cls._mask(lost, numbers, buffer.device), view))

    @staticmethod
    def scale_(shard: torch.Tensor, units: BucketUnits, factors: np.ndarray) -> None:
        """See :meth:`IndexedRows.scale_`."""
        for view, numbers in unit_views(shard, units):
            values = factors[numbers]
            if len(values) == 1:
                view.mul_(float(values[0]))
            else:
                view.mul_(to_tensor(values.astype(np.float32), shard.device)[None, :, None])


Rows = type[IndexedRows] | type[MaskedRows]


def rows_for(device: torch.device) -> Rows:
    """The implementation that suits ``device``."""
    return MaskedRows if device.type == "hpu" else IndexedRows
