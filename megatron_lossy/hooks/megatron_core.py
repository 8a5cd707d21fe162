"""The patches of megatron-core: the seam, the registration of buckets, the counting of steps."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..ledger import Patch, Takes
from . import seam
from .runtime import LossyRuntime

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"
_UNTIL = "Megatron offers hooks around its data-parallel collectives"

_REDUCE_SCATTER = Takes(("output|output_tensor", "input|input_tensor", "op", "group", "async_op"))
_ALL_GATHER = Takes(("output_tensor|output", "input_tensor|input", "group", "async_op"))
_SELF = Takes(("self",), others=())


def _seam_patches(runtime: LossyRuntime) -> list[Patch]:
    def reduce_scatter(original: Callable) -> Callable:
        return seam.wrap_reduce_scatter(original, lambda: runtime.iteration, runtime.loss_scale)

    def all_gather(original: Callable) -> Callable:
        return seam.wrap_all_gather(original, lambda: runtime.update)

    return [
        Patch(
            f"{_BUFFER}:dist_reduce_scatter_func",
            reduce_scatter,
            "removes from the send buffer what will not arrive",
            "all",
            _UNTIL,
            takes=_REDUCE_SCATTER,
        ),
        Patch(
            f"{_BUFFER}:reduce_scatter_with_fp32_accumulation",
            reduce_scatter,
            "DDP rebinds dist_reduce_scatter_func to it when it is built",
            "0.16 and later",
            _UNTIL,
            optional=True,
            takes=_REDUCE_SCATTER,
        ),
        Patch(
            f"{_BUFFER}:dist_all_gather_func",
            all_gather,
            "puts aside the units that will stay stale",
            "all",
            _UNTIL,
            takes=_ALL_GATHER,
        ),
        Patch(
            f"{_BUFFER}:_coalescing_manager",
            seam.wrap_coalescing_manager,
            "the collectives run, and recovery follows, when this context exits or its handle is waited for",
            "all",
            _UNTIL,
            takes=Takes(("group", "device", "async_ops"), others=()),
        ),
    ]


def _step_patch(runtime: LossyRuntime, class_name: str, method: str) -> Patch:
    applies = method == "step_with_ready_grads"

    def replacement(original: Callable) -> Callable:
        @functools.wraps(original)
        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            with runtime.optimizer_step(applies):
                return original(self, *args, **kwargs)

        return step

    why = "an update begins on entry to the outermost one" if applies else "an iteration ends with the outermost one"
    until = "Megatron counts steps in its core"
    return Patch(f"{_OPTIMIZER}:{class_name}.{method}", replacement, why, "all", until, takes=_SELF)


def _after_init(note: Callable[[Any], None]) -> Callable[[Callable], Callable]:
    """A constructor that calls ``note`` with the finished object."""

    def replacement(original: Callable) -> Callable:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            note(self)

        return __init__

    return replacement


def patches(runtime: LossyRuntime) -> list[Patch]:
    """Every patch that a lossy run needs in megatron-core."""

    def notice_all_reduce(original: Callable) -> Callable:
        @functools.wraps(original)
        def start_grad_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
            if any(args) or any(kwargs.values()):
                runtime.note_all_reduce()
            return original(self, *args, **kwargs)

        return start_grad_sync

    return [
        *_seam_patches(runtime),
        Patch(
            "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            _after_init(runtime.add_model_chunk),
            "learns which buckets exist, in canonical order",
            "all",
            _UNTIL,
            takes=Takes(("self", "config", "ddp_config", "module")),
        ),
        Patch(
            f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync",
            notice_all_reduce,
            "says once that steps with force_all_reduce carry no loss",
            "all, of use from 0.16 on",
            "force_all_reduce is gone",
            takes=Takes(("self",), others=("force_all_reduce",)),
        ),
        Patch(
            f"{_OPTIMIZER}:MixedPrecisionOptimizer.__init__",
            _after_init(runtime.add_optimizer),
            "learns the loss scale, which --grad-recovery previous must not keep",
            "all",
            "the loss scale can be read from DDP",
            takes=Takes(("self", "optimizer", "config", "grad_scaler")),
        ),
        *(
            _step_patch(runtime, class_name, method)
            for class_name in ("MixedPrecisionOptimizer", "ChainedOptimizer")
            for method in ("step", "step_with_ready_grads")
        ),
    ]
