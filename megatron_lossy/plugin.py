"""Loss for programs built on ``megatron.training``.

Two kinds of programs use this module: ``python -m megatron_lossy``, and a fork that carries
``patches/megatron_lm.patch`` and calls :func:`enable`. Both read the loss flags from the command line. Both refuse
wrong flags before Megatron starts anything. Both install the hooks after ``megatron.training`` is imported and before
the training script goes on.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .base.errors import ArgumentParser, UsageError, tell_torchrun, usage_errors
from .base.flags import add_flags, from_namespace
from .base.jobs import World, launched_ranks
from .config import LossyConfig
from .config.facts import Facts
from .config.loss_flags import add_preset_and_help, with_preset
from .config.refusal import check_refusals
from .config.settings import note_origins_of

if TYPE_CHECKING:
    from .base.ledger import Ledger, Patch
    from .hooks import Lossy

_ledgers: dict[str, Ledger] = {}
_lossy: Lossy | None = None


def _split(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the loss flags, and the rest. Megatron's own parser reads that, and answers ``--help``."""
    parser = add_flags(ArgumentParser(add_help=False, allow_abbrev=False), LossyConfig, "loss")
    add_preset_and_help(parser)  # --help-loss ends here, before any import of Megatron
    return parser.parse_known_args(arguments)


def parse_loss_flags(arguments: list[str]) -> LossyConfig:
    """Read the loss flags among Megatron's arguments. Checks everything that needs no import."""
    words = with_preset(arguments)
    note_origins_of(words, LossyConfig)
    return from_namespace(LossyConfig, _split(words)[0])


def check_command_line(config: LossyConfig, arguments: list[str]) -> int | None:
    """Check files of rates and traces against the size and the length of the run. Return the length if it is known.

    If Megatron reads the sizes from a checkpoint or a file of settings, files are checked once it has read them.
    """
    from .transport import check_channels

    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "train-iters")
    for name in names:
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--yaml-cfg")
    for name in ("use-checkpoint-args", "use-mp-args-from-checkpoint-args"):
        parser.add_argument(f"--{name}", action="store_true")
    found = parser.parse_known_args(arguments)[0]
    if found.yaml_cfg:
        return None  # in the place of the whole command line
    if found.use_checkpoint_args or found.use_mp_args_from_checkpoint_args:
        return found.train_iters
    world = launched_ranks() * config.jobs().launches
    # Context-parallel ranks shard the optimizer too, so that they do not divide the group.
    size, rest = divmod(world, (found.tensor_model_parallel_size or 1) * (found.pipeline_model_parallel_size or 1))
    if not rest:
        length = found.train_iters
        facts = Facts(flushes=True, workers=size, virtual=False, train_iters=length, ends=length is not None)
        check_refusals(config, facts)
        config.jobs().check(length)
        check_channels(config, size, length)
    return found.train_iters


def install(config: LossyConfig, steps: int | None) -> Lossy:
    """Add our flags to ``megatron.training``, which must be importable, and make it lose data as ``config`` says.

    On a machine without an accelerator this also makes Megatron usable. ``steps`` is the length of the run, if it is
    known. Return the hooks. A second call with the same ``config`` returns the same hooks. Raise
    :class:`UsageError` for another ``config``, and for a Megatron that is not supported or not as expected.
    """
    global _lossy
    from .transport import settled

    config = settled(config)
    if _lossy is not None:
        if _lossy.config != config:
            raise UsageError("the loss flags changed after the hooks were installed with others")
        return _lossy
    import megatron.core

    from . import hooks
    from .base import device
    from .hooks import megatron_training

    hooks.check_version(megatron.core.__version__)
    device.prepare(megatron_training=True)
    world: World | None = config.jobs().world(0)  # Megatron's arguments have the seed
    if world is not None:
        world.tell_environment()  # of which Megatron makes its arguments
    if os.environ.get("RANK", "0") == "0":
        from .hooks.dataset_helper import build_helper

        build_helper()
        if config.inert:
            print(_nothing_lost(config, sys.argv[1:]), flush=True)
    lossy = hooks.install(config, steps, world=world)
    _install_once("flags", megatron_training.flag_patches)
    if not config.inert:
        _install_once("megatron.training", lambda: megatron_training.patches(lossy))
    _lossy = lossy
    atexit.register(_close)  # of programs with a training loop of their own, around which nothing is running()
    return lossy


def _nothing_lost(config: LossyConfig, arguments: list[str]) -> str:
    """Return the line of a run in which nothing is done, which says whether it was asked for."""
    given = len(_split(arguments)[1]) < len(arguments)
    return f"loss: {config.describe()}{'' if given else '; no loss flag was given'}"


def enable() -> None:
    """Do the launcher's work in a fork, which calls this at the end of ``megatron/training/__init__.py``.

    Megatron's parser then takes the loss flags. The rest of :func:`install` happens only if the command line has one
    of them; a rate of 0 counts. Every other program of the fork stays as it was. A wrong flag ends the process with
    one line and status 2. A second call changes nothing. Neither does a call under the launcher.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name.partition(".")[0] == __package__:
        return  # our own programs install the hooks that they need for themselves
    from .hooks import megatron_training

    with usage_errors():
        _install_once("flags", megatron_training.flag_patches)
        _obey_command_line()
        _install_once("command line", _command_line_patches)


@contextlib.contextmanager
def running() -> Iterator[None]:
    """Wrap a run. A wrong input becomes one line and exit status 2. In the end the observers' records are complete.

    A run that ends well waits for other jobs, which may still need its messages.
    """
    with usage_errors():
        try:
            yield
            _leave()
        except SystemExit as ended:  # as Megatron ends a run after a signal
            if not ended.code:
                _leave()
            raise
        except (UsageError, OSError):
            raise
        except Exception:
            tell_torchrun(traceback.format_exc())
            raise
        finally:
            _close()


def _obey_command_line() -> None:
    arguments = sys.argv[1:] = with_preset(sys.argv[1:])  # Megatron's parser sees the flags of a preset
    if _lossy is not None or len(_split(arguments)[1]) < len(arguments):
        config = parse_loss_flags(arguments)
        if _lossy is None or _lossy.config != config:
            install(config, check_command_line(config, arguments))
            _install_once("programs", _program_patches)


def _add_distributed_args(original: Callable, parser: Any) -> Any:
    with usage_errors():
        _obey_command_line()
    return original(parser)


def _command_line_patches() -> list[Patch]:
    from .hooks.megatron_training import flag_patches

    why = "a script may put its command line together after it has imported megatron.training"
    return flag_patches(_add_distributed_args, why)


def _pretrain(original: Callable, *args: Any, **kwargs: Any) -> Any:
    with running():
        note_origins_of(sys.argv[1:], LossyConfig)
        return original(*args, **kwargs)


def _program_patches() -> list[Patch]:
    from .base.ledger import Patch

    why = "no launcher is around the script to report wrong input and to complete the records"
    modules = ("megatron.training", "megatron.training.training")  # scripts import it from either
    return [Patch(target=f"{module}:pretrain", around=_pretrain, why=why) for module in modules]


def _install_once(name: str, patches: Callable[[], list[Patch]]) -> None:
    from .base.ledger import Ledger

    ledger = _ledgers.setdefault(name, Ledger(f"megatron.training ({name})"))
    if not ledger.installed:
        ledger.install(patches())


def _leave() -> None:
    if _lossy is not None:
        _lossy.leave()


def _close() -> None:
    atexit.unregister(_close)
    if _lossy is not None:
        _lossy.close_observers()
