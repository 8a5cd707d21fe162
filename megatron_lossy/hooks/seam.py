"""The seam: the three module globals through which Megatron's data-parallel traffic passes.

``megatron.core.distributed.param_and_grad_buffer`` calls ``dist_reduce_scatter_func`` and ``dist_all_gather_func``
inside ``_coalescing_manager``. The collectives run when that context exits. So the calls do the work that comes before
them. The exit of the context, or the returned handle's ``wait``, does the work that comes after them.

Buffers that take part carry a :class:`Slot` as an attribute; all others pass untouched.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ..run.base import Run
from ..transport import LossyGroup, Transfer

_ATTRIBUTE = "_megatron_lossy_slot"


class _Open(threading.local):
    """Functions that complete the exchanges of this thread."""

    #: They complete the exchanges begun in the open coalescing context; ``None`` without one.
    ends: list[Callable[[], Any]] | None = None
    #: For the all-reduce of the next coalescing context: a function to call before it, and one that completes it.
    around: tuple[Callable[[], Any], Callable[[], Any]] | None = None


_open = _Open()  # autograd launches collectives on a thread of its own


@dataclass(frozen=True)
class Slot:
    """The bucket of a lossy group that a buffer belongs to."""

    group: LossyGroup
    bucket: int


def attach(buffer: torch.Tensor, slot: Slot) -> None:
    """Make the exchanges of ``buffer`` (a bucket's ``grad_data`` or ``param_data``) lossy."""
    setattr(buffer, _ATTRIBUTE, slot)


def slot_of(buffer: torch.Tensor) -> Slot | None:
    """The slot that :func:`attach` gave to ``buffer``."""
    return getattr(buffer, _ATTRIBUTE, None)


@contextlib.contextmanager
def all_reduce(before: Callable[[], Any], after: Callable[[], Any]) -> Iterator[None]:
    """Surround the coalescing context of an all-reduce: ``before`` is called at its start, ``after`` completes it.

    Without such a context nothing is called.
    """
    outer, _open.around = _open.around, (before, after)  # one bucket group may end another before it begins
    try:
        yield
    finally:
        _open.around = outer


@contextlib.contextmanager
def coalescing_manager(original: Callable, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Wraps ``_coalescing_manager``: completes the lossy exchanges begun in it at its end or its handle's ``wait``."""
    asynchronous = kwargs.get("async_ops", args[2] if len(args) > 2 else False)
    around, _open.around = _open.around, None
    ends: list[Callable[[], Any]] = []
    if around is not None:
        before, after = around
        before()
    outer, _open.ends = _open.ends, ends
    try:
        with original(*args, **kwargs) as manager:
            yield Transfer(manager, lambda: _complete_all(ends))
            if around is not None:
                ends.append(after)
    finally:
        _open.ends = outer
    if not asynchronous:
        _complete_all(ends)


def _complete_all(ends: list[Callable[[], Any]]) -> None:
    """Complete the exchanges of a context, whose collectives have arrived."""
    for end in ends:
        end()


def reduce_scatter(
    run: Run, original: Callable, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Wraps a reduce-scatter (``output, input, op=, group=, async_op=``): the group of its slot loses units."""
    slot = slot_of(input)
    if slot is None or (slot.group.lossless("grad") and slot.group.errors is None):
        return original(output, input, *args, **kwargs)
    averaged = kwargs.get("op", args[0] if args else None) == torch.distributed.ReduceOp.AVG
    return begun(
        slot.group.reduce_scatter(
            slot.bucket,
            input,
            output,
            run.iteration,
            lambda: original(output, input, *args, **kwargs),
            averaged,
            run.loss_scale,
            run.gapless,
        ),
    )


def all_gather(
    run: Run, original: Callable, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Wraps an all-gather (``output, input, group=, async_op=``): units that the group of its slot loses stay stale."""
    slot, update = slot_of(output), run.update
    if slot is None or update is None or slot.group.lossless("param"):
        return original(output, input, *args, **kwargs)
    return begun(
        slot.group.all_gather(slot.bucket, output, input, update, lambda: original(output, input, *args, **kwargs)),
    )


def start_grad_sync(run: Any, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the start of the gradient exchange of a bucket group, which may be an all-reduce. ``run``: the hooks'."""
    if any(args) or any(kwargs.values()):
        run.note_all_reduce(self)
    with run.reducing(self):
        return original(self, *args, **kwargs)


def begun(transfer: Transfer) -> Any:
    """Complete ``transfer`` when the open coalescing context ends or its handle is waited for.

    Without a context, a collective that returns no handle is over already.
    """
    if _open.ends is not None:
        _open.ends.append(transfer.end_of_context)
    elif not transfer.has_work:
        transfer.complete()
    # With fp32 accumulation Megatron waits for this handle instead of the context's.
    return transfer if transfer.has_work else None
