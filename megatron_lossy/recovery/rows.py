"""Reads and changes the lost units of a bucket in place; and copies to an accelerator that do not block.

:class:`IndexedRows` touches only lost units: its time and memory follow the loss. :class:`MaskedRows` has the same
effect with shapes and numbers in its graph that do not depend on the loss, for devices that compile each graph (HPU).
Lost values are selected, never multiplied: infinity times zero is not zero.

Torch is imported when it is needed: flags are checked where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ..base.exchange import BucketUnits, Lost

if TYPE_CHECKING:
    import torch

#: The result of ``take``: tensors for each view of the bucket.
Saved = list[tuple[Any, ...]]


def to_device(values: np.ndarray | torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return ``values``, in host memory, as a tensor on ``device``; on a CPU it shares their memory.

    A copy to a CUDA device goes through page-locked memory. From other memory, a copy of more than 64 KiB waits until
    the device has done all queued work, which may be a whole backward pass. torch keeps a pool of page-locked memory,
    and reuses none of it before the copy from it is done.
    """
    import torch

    tensor, device = torch.from_numpy(values) if isinstance(values, np.ndarray) else values, torch.device(device)
    return page_locked(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``tensor`` in page-locked memory."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Note in torch that the current stream uses ``tensors``, which another stream may have allocated.

    torch then reuses their memory only after the current stream is done with it. HPU's graphs ensure this themselves,
    and a CPU has no streams.
    """
    import torch

    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())


def unit_views(buffer: torch.Tensor, units: BucketUnits) -> list[tuple[torch.Tensor, slice]]:
    """Return ``buffer`` [shards * shard] as [shards, units, elements], with unit numbers. A shorter last unit is apart.

    The shards of a ``buffer`` [shards, shard] need not be next to each other.
    """
    shards, start = buffer.numel() // units.shard, buffer.storage_offset()
    apart = buffer.stride(0) if buffer.dim() == 2 else units.shard
    views = []
    for numbers, elements in units.parts:
        shape, first = (shards, numbers.stop - numbers.start, elements), start + numbers.start * units.elements
        views.append((buffer.as_strided(shape, (apart, elements, 1), first), numbers))
    return views


def times(saved: Saved, factor: Any) -> Saved:
    """Return the result of ``take`` in float32, its values multiplied by ``factor``, a number or a scalar tensor."""
    return [tuple(part.float() * factor if part.is_floating_point() else part for part in parts) for parts in saved]


def _float32(factors: np.ndarray, device: torch.device) -> torch.Tensor:
    return to_device(factors.astype(np.float32), device)[None, :, None]


def _flat(view: torch.Tensor) -> torch.Tensor:
    """Return contiguous ``view`` [shards, units, elements] as [shards * units, elements], for work on whole rows."""
    return view.view(-1, view.shape[2])


def _numbers(view: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    shards, units = index
    return shards.long() * view.shape[1] + units


def _select(view: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return _flat(view).index_select(0, _numbers(view, index)) if view.is_contiguous() else view[index.unbind()]


class IndexedRows:
    """Operations that cost work proportional to the loss."""

    @staticmethod
    def nothing(lost: Lost) -> bool:
        """Return whether the work for ``lost`` may be skipped, because nothing was lost."""
        return not lost.mask.any()

    @classmethod
    def zero_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost) -> None:
        """Set the units that are ``lost``, and not spared, to zero."""
        for view, numbers in unit_views(buffer, units):
            places = lost.places(numbers)
            if lost.spared is not None and places.size:
                index = to_device(places, buffer.device)
                cls._write(view, index, cls._zeroed(_select(view, index), lost, numbers, index))
            elif units.count == 1:
                for shard in places[0]:
                    view[shard].zero_()
            elif places.size:
                view.index_put_(to_device(places, buffer.device).unbind(), view.new_zeros(()))

    @classmethod
    def take(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost) -> Saved:
        """Return copies of the ``lost`` units, spared or not; give them to :meth:`put_` with the same ``lost``."""
        saved: Saved = []
        for view, numbers in unit_views(buffer, units):
            places = lost.places(numbers)
            if units.count == 1:
                saved.append(tuple(view[shard].clone() for shard in places[0]))
            elif places.size:
                index = to_device(places, buffer.device)
                saved.append((index, _select(view, index)))
            else:
                saved.append(())
        return saved

    @classmethod
    def put_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        """Write the units that :meth:`take` returned for ``lost``."""
        for (view, numbers), values in zip(unit_views(buffer, units), saved, strict=True):
            used_here(values)
            if units.count == 1:
                for shard, value in zip(lost.places(numbers)[0], values, strict=True):
                    view[shard].copy_(value)
            elif values:
                cls._write(view, *values)

    @staticmethod
    def _write(view: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
        if view.is_contiguous():
            _flat(view).index_copy_(0, _numbers(view, index), values)
        else:
            view.index_put_(index.unbind(), values)

    @staticmethod
    def _zeroed(values: torch.Tensor, lost: Lost, numbers: slice, index: torch.Tensor) -> torch.Tensor:
        """Return ``values`` [k, elements] of the units at ``index``, or zeros for those that are not spared."""
        spared = _select(lost.spared[:, numbers, None], index)
        return values.masked_fill(~spared, 0)

    @classmethod
    def clear_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        """Do as :meth:`zero_`. ``saved``: the result of :meth:`take` for ``lost``, which the buffer still has."""
        if lost.spared is None or units.count == 1:
            cls.zero_(buffer, units, lost)
            return
        for (view, numbers), values in zip(unit_views(buffer, units), saved, strict=True):
            if values:
                index, kept = values
                cls._write(view, index, cls._zeroed(kept, lost, numbers, index))

    @staticmethod
    def narrow(units: BucketUnits, lost: Lost, left: Lost, saved: Saved) -> Saved:
        """Return the part of ``saved``, taken for ``lost``, that belongs to the units ``left`` of these."""
        result: Saved = []
        for (numbers, _), values in zip(units.parts, saved, strict=True):
            shards, places = lost.places(numbers)
            kept = left.mask[:, numbers][shards, places]
            used_here(values)
            if kept.all():
                result.append(values)
            elif units.count == 1:
                result.append(tuple(value for value, keeps in zip(values, kept, strict=True) if keeps))
            elif kept.any():
                index = to_device(np.flatnonzero(kept), values[-1].device)
                places_, values_ = values
                result.append((places_.index_select(1, index), values_.index_select(0, index)))
            else:
                result.append(())
        return result

    @classmethod
    def add_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        """Add the result of :meth:`take` for ``lost`` to the units that are ``lost``; the sum is rounded once."""
        for (view, numbers), values in zip(unit_views(buffer, units), saved, strict=True):
            used_here(values)
            if units.count == 1:
                for shard, value in zip(lost.places(numbers)[0], values, strict=True):
                    view[shard].copy_(view[shard] + value)
            elif values and view.is_contiguous() and values[1].dtype == view.dtype:
                _flat(view).index_add_(0, _numbers(view, values[0]), values[1])
            elif values:
                index, added = values
                view.index_put_(index.unbind(), (_select(view, index) + added).to(view.dtype))

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
                view.mul_(_float32(values, shard.device))


class MaskedRows(IndexedRows):
    """The same operations with full-size masks: their shapes do not depend on the loss. ``take`` copies everything."""

    @staticmethod
    def nothing(lost: Lost) -> bool:
        return False  # a skipped graph would be another graph

    @staticmethod
    def _mask(lost: Lost, numbers: slice, device: torch.device) -> torch.Tensor:
        mask = to_device(np.ascontiguousarray(lost.mask[:, numbers, None]), device)
        return mask if lost.spared is None else mask & ~lost.spared[:, numbers, None]

    @classmethod
    def _shards(
        cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the kept values, a view and the mask of each shard: no second whole copy of the bucket is needed."""
        for (view, numbers), (value,) in zip(unit_views(buffer, units), saved, strict=True):
            used_here((value,))
            yield from zip(value, view, cls._mask(lost, numbers, buffer.device), strict=True)

    @classmethod
    def zero_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost) -> None:
        for view, numbers in unit_views(buffer, units):
            view.masked_fill_(cls._mask(lost, numbers, buffer.device), 0)

    @classmethod
    def take(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost) -> Saved:
        return [(view.clone(),) for view, _ in unit_views(buffer, units)]

    @classmethod
    def put_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        for old, new, mask in cls._shards(buffer, units, lost, saved):
            new.copy_(old.where(mask, new))

    @classmethod
    def add_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        for old, new, mask in cls._shards(buffer, units, lost, saved):
            new.copy_((new + old).to(new.dtype).where(mask, new))

    @classmethod
    def clear_(cls, buffer: torch.Tensor, units: BucketUnits, lost: Lost, saved: Saved) -> None:
        cls.zero_(buffer, units, lost)

    @staticmethod
    def narrow(units: BucketUnits, lost: Lost, left: Lost, saved: Saved) -> Saved:
        return saved  # which has everything anyway

    @staticmethod
    def scale_(shard: torch.Tensor, units: BucketUnits, factors: np.ndarray) -> None:
        for view, numbers in unit_views(shard, units):
            view.mul_(_float32(factors[numbers], shard.device))  # a number would become part of the graph


def rows_for(device: torch.device | None = None) -> type[IndexedRows]:
    """Return the implementation that suits ``device``; by default the accelerator of this process."""
    import torch

    masked = hasattr(torch, "hpu") if device is None else device.type == "hpu"  # Gaudi's software sets the attribute
    return MaskedRows if masked else IndexedRows
