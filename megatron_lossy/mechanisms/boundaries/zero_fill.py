"""Zeros in the place of lost packets, and their gradient. Shapes do not depend on the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ...base.errors import refuse
from ...base.exchange import Lost
from ...recovery import rows_for
from ...recovery.rows import to_device


def elements_of(packet_bytes: int, dtype: torch.dtype) -> int:
    """Return elements in a packet. Raise :class:`UsageError` if a packet holds none."""
    if packet_bytes < dtype.itemsize:
        raise refuse("--packet-bytes", packet_bytes, f"must hold at least one element of {dtype.itemsize} bytes")
    return packet_bytes // dtype.itemsize


def changes_nothing(lost: np.ndarray, device: torch.device) -> bool:
    """Return whether the work for the packets ``lost`` bool[packets] may be left out, because there are none.

    It never may on a device that compiles each graph (HPU): without it the graph would be another.
    """
    return rows_for(device).nothing(Lost(lost[None]))


def zero_fill_(tensor: torch.Tensor, lost: np.ndarray, elements: int) -> None:
    """Write zeros over the packets of ``elements`` in the contiguous ``tensor`` that are ``lost`` bool[packets].

    The last packet may be shorter. Infinities become zeros, too.
    """
    flat, mask, whole = tensor.detach().view(-1), to_device(lost, tensor.device), tensor.numel() // elements
    assert len(mask) == -(-flat.numel() // elements)
    flat[: whole * elements].view(whole, elements).masked_fill_(mask[:whole, None], 0)
    if len(mask) > whole:
        flat[whole * elements :].masked_fill_(mask[whole:], 0)


def zero_filled(tensor: torch.Tensor, lost: np.ndarray, elements: int) -> torch.Tensor:
    """Return a contiguous copy of ``tensor`` with the zeros of :func:`zero_fill_`."""
    result = tensor.detach().clone(memory_format=torch.contiguous_format)
    zero_fill_(result, lost, elements)
    return result


class _Lossy(torch.autograd.Function):
    """A boundary within one process: forward loses activations, backward gradients."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, lost: np.ndarray, lost_gradients: np.ndarray, elements: int
    ) -> torch.Tensor:
        ctx.fill = [mask for mask in (lost, lost_gradients) if not changes_nothing(mask, tensor.device)]
        ctx.elements = elements
        return zero_filled(tensor, lost, elements)  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        [gradient] = gradients
        for lost in ctx.fill:
            gradient = zero_filled(gradient, lost, ctx.elements)
        return gradient, None, None, None


def lossy(tensor: torch.Tensor, lost: np.ndarray, lost_gradients: np.ndarray, elements: int) -> torch.Tensor:
    """Return ``tensor`` as it arrives at the next stage; its gradient loses packets on the way back.

    ``lost``, ``lost_gradients`` bool[packets]: the packets that are lost forward, and backward. The
    gradient of lost activations is zero, because zeros have none.
    """
    if changes_nothing(lost | lost_gradients, tensor.device):
        return tensor
    return _Lossy.apply(tensor, lost, lost_gradients, elements)  # type: ignore[no-untyped-call]
