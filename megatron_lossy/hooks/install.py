"""Installing and removing the hooks."""

from __future__ import annotations

import weakref

from ..base.errors import UsageError
from ..base.jobs import World
from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from . import megatron_core
from .runtime import Lossy
from .versions import check_version

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
    try:
        import megatron.core
    except ImportError as error:
        raise UsageError(f"megatron-core cannot be imported ({error}); install it: pip install megatron-core") from None
    check_version(megatron.core.__version__)
    lossy = Lossy(config, steps, gapless, world)
    lossy.facts = facts
    lossy.ledger.install([] if config.inert else megatron_core.patches(lossy))
    lossy.installed = True
    _current = weakref.ref(lossy)
    return lossy
