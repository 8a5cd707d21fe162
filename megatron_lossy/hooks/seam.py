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
from functools import partial, wraps
from typing import Any

import torch

from ..base.exchange import Exchange
from ..recovery import Gradients
from ..run.base import Run
from ..transport import LossyGroup, Transfer

_ATTRIBUTE = "_megatron_lossy_slot"


class _Completions(threading.local):
    """Functions that complete the exchanges of this thread."""

    #: They complete the exchanges begun in the open coalescing context; ``None`` without one.
    ends: list[Callable[[], Any]] | None = None
    #: For the all-reduce of the next coalescing context: a function to call before it, and one that completes it.
    around: tuple[Callable[[], Any], Callable[[], Any]] | None = None


_open = _Completions()  # autograd launches collectives on a thread of its own


@dataclass(frozen=True)
class Slot:
    """The bucket of a lossy group that a buffer belongs to."""

    group: LossyGroup
    bucket: int


def attach(buffer: torch.Tensor, slot: Slot) -> None:
    """Make the exchanges of ``buffer`` (a bucket's ``grad_data`` or ``param_data``) lossy."""
    setattr(buffer, _ATTRIBUTE, slot)


def slot_of(buffer: torch.Tensor) -> Slot | None:
    """Return the slot that :func:`attach` gave to ``buffer``."""
    return getattr(buffer, _ATTRIBUTE, None)


@contextlib.contextmanager
def coalescing_manager(original: Callable, *args: Any, **kwargs: Any) -> Iterator[Any]:
    """Wrap ``_coalescing_manager``: complete the lossy exchanges begun in it at its end or its handle's ``wait``."""
    asynchronous = kwargs.get("async_ops", args[2] if len(args) > 2 else False)
    around, _open.around = _open.around, None
    ends: list[Callable[[], Any]] = []

    def finish() -> None:
        for end in ends:
            end()

    if around is not None:
        before, after = around
        before()
    outer, _open.ends = _open.ends, ends
    try:
        with original(*args, **kwargs) as manager:
            yield Transfer(manager, finish) if asynchronous else manager
            if around is not None:
                ends.append(after)
    finally:
        _open.ends = outer
    if not asynchronous:
        finish()


def reduce_scatter(
    run: Run, original: Callable, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Wrap a reduce-scatter (``output, input, op=, group=, async_op=``): the group of its slot loses units."""
    slot = slot_of(input)
    collective = partial(original, output, input, *args, **kwargs)
    if slot is None:
        return collective()
    averaged = kwargs.get("op", args[0] if args else None) == torch.distributed.ReduceOp.AVG
    exchange = Exchange("grad", slot.group.stream, run.iteration)
    x = Gradients(exchange, slot.bucket, input, output, collective, averaged, run.loss_scale, run.gapless)
    return begun(slot.group.reduce_scatter(x))


def all_gather(
    run: Run, original: Callable, output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Wrap an all-gather (``output, input, group=, async_op=``): units that the group of its slot loses stay stale."""
    slot, update = slot_of(output), run.update
    collective = partial(original, output, input, *args, **kwargs)
    if slot is None or update is None:
        return collective()
    return begun(slot.group.all_gather(slot.bucket, output, input, update, collective))


def grad_sync(run: Any, original: Callable) -> Callable:
    """Wrap the start of the gradient exchange of a bucket group, which may be an all-reduce. ``run``: the hooks'."""

    @wraps(original)
    def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        if any(args) or any(kwargs.values()):
            run.note_all_reduce(self)
        outer = _open.around  # one bucket group may end another before it begins
        if run.around_all_reduce is not None:
            before, after = run.around_all_reduce
            _open.around = partial(before, self), partial(after, self)
        try:
            return original(self, *args, **kwargs)
        finally:
            _open.around = outer

    return start_grad_sync


def begun(transfer: Transfer) -> Any:
    """Complete ``transfer`` when the open coalescing context ends or its handle is waited for.

    Without a context, a collective that returns no handle has ended already.
    """
    if _open.ends is not None:
        _open.ends.append(transfer.wait if transfer.apart else transfer.complete)
    elif transfer.work is None:
        transfer.complete()
    # With fp32 accumulation Megatron waits for this handle instead of the context's.
    return None if transfer.work is None else transfer
