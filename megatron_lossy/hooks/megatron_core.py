"""The patches of megatron-core, and their installation: the seam, the registration of buckets, the counting of steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from ..base.jobs import World
from ..base.ledger import Patch, Signature
from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from . import seam
from .runtime import Lossy
from .versions import require_megatron

_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
_OPTIMIZER = "megatron.core.optimizer.optimizer"

_REDUCE_SCATTER = Signature(("output|output_tensor", "input|input_tensor", "op", "group", "async_op"))
_ALL_GATHER = Signature(("output_tensor|output", "input_tensor|input", "group", "async_op"))


def after_init(note: Callable[[Any], None], original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap a constructor: call ``note`` with the finished object."""
    original(self, *args, **kwargs)
    note(self)


def step(run: Lossy, applies: bool, original: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap ``step`` or, if ``applies``, ``step_with_ready_grads`` of an optimizer."""
    with run.optimizer_step(self, applies):
        return original(self, *args, **kwargs)


def patches(run: Lossy) -> list[Patch]:
    """Return every patch that a lossy run needs in megatron-core."""
    return [
        *run.patches,
        *([] if run.config.sites is None else [run.exchanges.scalars.patch("torch.distributed:all_reduce")]),
        Patch(
            target=f"{_BUFFER}:dist_reduce_scatter_func",
            around=partial(seam.reduce_scatter, run),
            why="removes from the send buffer what will not arrive",
            takes=_REDUCE_SCATTER,
        ),
        Patch(
            target=f"{_BUFFER}:reduce_scatter_with_fp32_accumulation",
            around=partial(seam.reduce_scatter, run),
            why="DDP rebinds dist_reduce_scatter_func to it when it is built",
            optional=True,  # from 0.16 on
            takes=_REDUCE_SCATTER,
        ),
        Patch(
            target=f"{_BUFFER}:dist_all_gather_func",
            around=partial(seam.all_gather, run),
            why="puts aside the units that will stay stale",
            takes=_ALL_GATHER,
        ),
        Patch(
            target=f"{_BUFFER}:_coalescing_manager",
            around=seam.coalescing_manager,
            why="the collectives run, and recovery follows, when this context exits or its handle is waited for",
            takes=Signature(("group", "device", "async_ops"), others=()),
        ),
        Patch(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            around=partial(after_init, run.add_model_chunk),
            why="learns which buckets exist, in canonical order",
            takes=Signature(("self", "config", "ddp_config", "module")),
        ),
        Patch(
            target=f"{_BUFFER}:_ParamAndGradBucketGroup.start_grad_sync",
            make=partial(seam.grad_sync, run),
            why="sees which buckets are all-reduced: with force_all_reduce they lose nothing; without the distributed "
            "optimizer errors follow",
            takes=Signature(("self",), others=("force_all_reduce",)),
        ),
        *(
            Patch(
                target=f"{_OPTIMIZER}:{class_name}.__init__",
                around=partial(after_init, run.add_optimizer),
                why="learns the loss scale, without which rules keep gradients, and where the weights are that are updated",
                takes=Signature(("self", "optimizer", "config", argument)),
            )
            for class_name, argument in (("MixedPrecisionOptimizer", "grad_scaler"), ("FP32Optimizer", "init_state_fn"))
        ),
        *(
            Patch(
                target=f"{_OPTIMIZER}:{class_name}.{method}",
                around=partial(step, run, applies),
                why=why,
                takes=Signature(("self",), others=()),
            )
            for class_name in ("MixedPrecisionOptimizer", "FP32Optimizer", "ChainedOptimizer")
            for method, applies, why in (
                ("step", False, "an iteration ends with the outermost one"),
                ("step_with_ready_grads", True, "an update begins on entry to the outermost one"),
            )
        ),
    ]


_current: weakref.ref[Lossy] | None = None


def install(
    config: LossyConfig,
    steps: int | None = None,
    gapless: bool = False,
    world: World | None = None,
    asynchronous: bool = False,
) -> Lossy:
    """Hook megatron-core so that data-parallel exchanges lose data as ``config`` says. Call it before DDP is built.

    ``steps``: the length of the run, if known, so that a trace that is too short is refused at once. ``gapless``:
    promises that every iteration exchanges gradients (:class:`megatron_lossy.run.Run`), so that ``--grad-recovery
    previous`` needs less memory. ``world``: the launched ranks, if they are divided among several jobs.
    ``asynchronous``: promises a schedule without a flush. With a configuration that does nothing, nothing is patched at all. Raise
    :class:`UsageError` for a megatron-core that is not supported or not as expected, ``RuntimeError`` if hooks are
    already installed.
    """
    global _current
    before = _current() if _current is not None else None
    if before is not None and before.installed:
        raise RuntimeError("the hooks are already installed; call uninstall() on what install() returned first")
    facts = Facts(worlds_apart=world is not None, flushes=not asynchronous)
    check_refusals(config, facts)
    require_megatron()
    lossy = Lossy(config, steps, gapless, world)
    lossy.facts = facts
    lossy.ledger.install([] if config.inert else patches(lossy))
    lossy.installed = True
    _current = weakref.ref(lossy)
    return lossy
