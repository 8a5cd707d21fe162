"""Installing and removing the hooks."""

from __future__ import annotations

import contextlib
import weakref

from ..base.errors import UsageError
from ..base.jobs import World
from ..base.ledger import Check, check
from ..base.registry import MECHANISMS
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
    ``asynchronous``: promises a schedule without a flush. With a configuration that does nothing, nothing is patched at all. Raises
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


def check_patches() -> list[Check]:
    """Check whether the patches of a lossy run fit the installed Megatron; applies none of them.

    Includes those of ``megatron.training`` if it can be imported. Raises ``ImportError`` without megatron-core.
    """
    import megatron.core

    patched = {name: value for mechanism in MECHANISMS.all() for name, value in mechanism.patched.items()}
    config = LossyConfig(eval_weights="both", **patched)  # these flags need more patches
    lossy = Lossy(config)
    patches = megatron_core.patches(lossy)
    with contextlib.suppress(ImportError):
        import megatron.training.training  # noqa: F401

        from . import megatron_training

        patches += megatron_training.flag_patches() + megatron_training.patches(lossy)
    return [check(patch) for patch in patches]
