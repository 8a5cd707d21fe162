"""The seam: the three module globals through which Megatron's data-parallel traffic passes.

``megatron.core.distributed.param_and_grad_buffer`` calls ``dist_reduce_scatter_func`` and ``dist_all_gather_func``
inside ``_coalescing_manager``. The collectives run when that context exits. So what must happen before them happens
in the calls, and what must happen after them on leaving the context, or in the returned handle's ``wait``.

Buffers that take part carry a :class:`Slot` as an attribute; all others pass untouched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..transport import LossyGroup

_ATTRIBUTE = "_megatron_lossy_slot"
_open = threading.local()  # autograd launches collectives on a thread of its own


@dataclass(frozen=True)
class Slot:
    """Which bucket of which lossy group a buffer belongs to."""

    group: LossyGroup
    bucket: int


def attach(buffer: torch.Tensor, slot: Slot) -> None:
    """Make the exchanges of ``buffer`` (a bucket's ``grad_data`` or ``param_data``) lossy."""
    setattr(buffer, _ATTRIBUTE, slot)


def slot_of(buffer: torch.Tensor) -> Slot | None:
    """The slot that :func:`attach` gave to ``buffer``."""
    return getattr(buffer, _ATTRIBUTE, None)


class _Pending:
    """What is left to do after the collectives of one coalescing context."""

    def __init__(self) -> None:
        self.finishes: list[tuple[Callable[[torch.Tensor], None], torch.Tensor]] = []

    def run(self) -> None:
        finishes, self.finishes = self.finishes, []
        with torch.no_grad():
            for finish, output in finishes:
                finish(output)


class _Handle:
    """A handle whose ``wait`` also finishes the recovery; everything else is the wrapped handle's."""

    def __init__(self, handle: Any, pending: _Pending) -> None:
        self._handle = handle
        self._pending = pending
        self._waited = False

    def wait(self) -> None:
        # Only once: every wait of gloo's reduce-scatter copies the unrecovered result into the output again.
        if not self._waited:
            self._waited = True
            self._handle.wait()
            self._pending.run()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def wrap_coalescing_manager(original: Callable) -> Callable:
    """``_coalescing_manager`` that finishes the lossy exchanges made in it."""

    @contextlib.contextmanager
    def coalescing_manager(*args: Any, **kwargs: Any) -> Iterator[Any]:
        asynchronous = kwargs.get("async_ops", args[2] if len(args) > 2 else False)
        outer, _open.pending = getattr(_open, "pending", None), _Pending()
        pending = _open.pending
        try:
            with original(*args, **kwargs) as manager:
                yield _Handle(manager, pending)
        finally:
            _open.pending = outer
        if not asynchronous:
            pending.run()

    return coalescing_manager


def wrap_reduce_scatter(original: Callable, step: Callable[[], int], loss_scale: Callable[[], Any]) -> Callable:
    """A reduce-scatter (``output, input, op=, group=, async_op=``) that loses what its slot says.

    ``step()``: the iteration that is being computed. ``loss_scale()``: what the loss is multiplied with, or ``None``.
    """

    def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        slot = slot_of(input)
        if slot is None:
            return original(output, input, *args, **kwargs)
        averaged = kwargs.get("op", args[0] if args else None) == torch.distributed.ReduceOp.AVG
        with torch.no_grad():
            finish = slot.group.before_reduce_scatter(slot.bucket, input, step(), averaged, loss_scale())
        return _finish_later(original(output, input, *args, **kwargs), finish, output)

    return reduce_scatter


def wrap_all_gather(original: Callable, step: Callable[[], int | None]) -> Callable:
    """An all-gather (``output, input, group=, async_op=``) that keeps the stale units its slot says.

    ``step()``: the last successful update, or ``None`` if there was none since the weights were equal everywhere.
    """

    def all_gather(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        slot, current = slot_of(output), step()
        if slot is None or current is None:
            return original(output, input, *args, **kwargs)
        with torch.no_grad():
            finish = slot.group.before_all_gather(slot.bucket, output, current)
        return _finish_later(original(output, input, *args, **kwargs), finish, output)

    return all_gather


def _finish_later(handle: Any, finish: Callable | None, output: torch.Tensor) -> Any:
    """Do ``finish`` when the open coalescing context ends or the returned handle is waited for."""
    if finish is None:
        return handle
    pending = _open.pending
    assert pending is not None, "Megatron ran a data-parallel collective outside its coalescing context"
    pending.finishes.append((finish, output))
    # With fp32 accumulation Megatron waits for this handle instead of the context's.
    return _Handle(handle, pending) if handle is not None else None
