"""Copies to an accelerator that do not block, and memory that several streams use.

Torch is imported when it is needed: flags are checked where it is not installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def to_device(array: np.ndarray, device: torch.device | str = "cpu") -> torch.Tensor:
    """``array`` as a tensor on ``device``; see :func:`upload`."""
    import torch

    return upload(torch.from_numpy(array), torch.device(device))


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, in host memory, on ``device``; on a CPU it is itself.

    A copy to a CUDA device goes through page-locked memory. From other memory, a copy of more than 64 KiB waits until
    the device has done all queued work, which may be a whole backward pass. torch keeps a pool of page-locked memory,
    and reuses none of it before the copy from it is done.
    """
    return page_locked(tensor).to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def page_locked(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of ``tensor`` in page-locked memory."""
    import torch

    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor)


def used_here(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch that the current stream uses ``tensors``, which another stream may have allocated.

    torch then reuses their memory only after the current stream is done with it. HPU's graphs ensure this themselves,
    and a CPU has no streams.
    """
    import torch

    for tensor in tensors:
        if tensor.device.type == "cuda":
            tensor.record_stream(torch.cuda.current_stream())
