"""Steps of optimizers, and the decision, made here alone and before the weights change, whether one is an update.

An update is a call of the outermost ``step`` of an optimizer after which its parameters hold other values by its own
doing. torch calls the hooks of a step also for a step within it (``super().step()``), for a step that a fused kernel
skips since gradients overflowed, and for one that only makes the optimizer's state, with a learning rate of 0
(``torch.distributed.checkpoint.state_dict``). A step that raises an error calls its first hook alone.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch

from ..base.errors import refuse

#: The arguments of a step: positional ones, the optimizer among them, and the others.
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Kind(enum.Enum):
    """The kind of a step."""

    UPDATE = enum.auto()
    #: Its gradients overflowed, and it is skipped.
    REJECTED = enum.auto()
    #: Without gradients, or with a learning rate of 0: weights keep their values.
    IDLE = enum.auto()


class Steps:
    """The outermost steps of ``optimizers``, for ``run``, a :class:`.LossyRun`, which may be gone before them."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], run: Any) -> None:
        self._run = weakref.proxy(run)
        self._begun: dict[torch.optim.Optimizer, tuple[Kind, list[torch.Tensor]]] = {}
        me = weakref.ref(self)
        self._hooks: list[Any] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(partial(_before, me)))
            self._hooks.append(optimizer.register_step_post_hook(partial(_after, me)))

    def close(self) -> None:
        """Take the hooks away."""
        for hook in self._hooks:
            hook.remove()

    def before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Begin a step. Return other arguments for it, or ``None``."""
        self._begun.pop(optimizer, None)  # of a step that raised an error
        name = type(optimizer).__name__
        if torch._C._current_graph_task_id() != -1:
            raise refuse("optimizer", name, "steps during the backward pass, where no update ends; step after it")
        if "grad_scaler" in kwargs:
            raise refuse("optimizer", name, "takes grad_scaler, and does not show which steps it skips; use another")
        self._run.begin_step(optimizer)
        ready = partial(self._use_gradients, optimizer)
        changed = _with_closure(args, kwargs, ready)
        if changed is None:
            ready()
        return changed

    def _use_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        kind = _kind(optimizer)
        if hasattr(optimizer, "found_inf"):
            self._run.check_scaler()
        self._run.use_gradients(kind)
        copies = [value.clone() for value in _values(optimizer)] if kind is Kind.IDLE else []
        self._begun[optimizer] = kind, copies

    def after(self, optimizer: torch.optim.Optimizer) -> None:
        """End a step."""
        name = type(optimizer).__name__
        if optimizer not in self._begun:
            raise refuse("optimizer", name, "did not call its closure; call step() without one")
        kind, copies = self._begun.pop(optimizer)
        equal = partial(torch.allclose, rtol=0, atol=0, equal_nan=True)
        if not all(map(equal, copies, _values(optimizer) if copies else [])):
            why = "changes weights without gradients, or with a learning rate of 0; use another"
            raise refuse("optimizer", name, why)
        self._run.end_step(optimizer, kind)


def _before(me: weakref.ref[Steps], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Arguments | None:
    steps = me()
    return None if steps is None or _nested(optimizer, sys._getframe(1)) else steps.before(optimizer, args, kwargs)


def _after(me: weakref.ref[Steps], optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    steps = me()
    if steps is not None and not _nested(optimizer, sys._getframe(1)):
        steps.after(optimizer)


def _nested(optimizer: torch.optim.Optimizer, caller: FrameType) -> bool:
    """Return whether ``caller``, the function of torch that calls hooks, runs within another step of ``optimizer``.

    The stack says so. A count of open steps would be wrong after one that raised an error.
    """
    frame = caller
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code is caller.f_code and frame.f_locals.get("self") is optimizer:
            return True
    return False


def _with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], ready: Callable[[], None]) -> Arguments | None:
    """Return the arguments of a step with a closure that calls ``ready`` at its end; ``None`` without a closure."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if not callable(closure):
        return None

    def evaluate() -> Any:
        result = closure()
        ready()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": evaluate}
    return (args[0], evaluate, *args[2:]), kwargs


def _kind(optimizer: torch.optim.Optimizer) -> Kind:
    """Return the kind of a step of ``optimizer`` that is about to use its gradients."""
    overflowed = getattr(optimizer, "found_inf", None)  # of a GradScaler, for a kernel that skips by itself
    if overflowed is not None and float(overflowed) > 0:
        return Kind.REJECTED
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if any(parameter.grad is not None for parameter in group["params"]) and (rate is None or float(rate) != 0):
            return Kind.UPDATE
    return Kind.IDLE


def _values(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the values of all parameters in this process; not copies."""
    tensors = (parameter.detach() for group in optimizer.param_groups for parameter in group["params"])
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in tensors]
