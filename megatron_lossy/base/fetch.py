"""Copies from an accelerator to the host without a wait before they are read.

A plain copy to the host (``.cpu()``, ``.item()``) waits until the device has done all queued work, which may be a whole
backward pass. These copies are queued like any other work. Reading a copy waits for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

#: The event behind the latest copy of each stream, by device and stream.
_latest: dict[Any, Any] = {}


class PendingArray:
    """A tensor on its way to the host. ``tensor``: on any device; do not change it before :meth:`wait`.

    On CUDA the copy goes into page-locked memory, in the order of the current stream. From a CPU nothing is copied. On
    other devices :meth:`wait` makes the copy.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor.detach()
        self._event: Any = None
        self._array: np.ndarray | None = None
        if tensor.device.type == "cuda":
            self._begin()

    def _begin(self) -> None:
        stream = torch.cuda.current_stream(self._tensor.device)
        host = torch.empty(self._tensor.shape, dtype=self._tensor.dtype, pin_memory=True)
        self._tensor = host.copy_(self._tensor, non_blocking=True)
        self._stream = (stream.device, stream.cuda_stream)
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)
        _latest[self._stream] = self._event  # recorded: another thread may wait for it at once

    def wait(self) -> np.ndarray:
        """Return the values, once they are here; from a CPU those of the tensor itself.

        A wait ends all copies that were begun on the same stream before it, so that reading many of them costs one. A
        copy that is here costs none.
        """
        if self._array is None:
            if self._event is not None and not self._event.query():
                _latest[self._stream].synchronize()
                if not self._event.query():  # another thread has noted its copy late
                    self._event.synchronize()
            self._array = self._tensor.cpu().numpy()
        return self._array


@functools.cache
def stream_aside(device: torch.device) -> Any:
    """Return the stream of this process, on the CUDA ``device``, for copies during computation."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def aside(device: torch.device) -> Iterator[None]:
    """Return a context whose work on ``device`` goes to :func:`stream_aside`. Devices but CUDA have no such stream."""
    if device.type != "cuda":
        yield
        return
    with torch.cuda.stream(stream_aside(device)):
        yield


def is_here(tensor: torch.Tensor) -> bool:
    """Return whether ``tensor`` is in host memory."""
    return tensor.device.type == "cpu"


def at_hand(value: np.ndarray | PendingArray) -> np.ndarray:
    """Return ``value``, waited for if it is on its way."""
    return value.wait() if isinstance(value, PendingArray) else value
