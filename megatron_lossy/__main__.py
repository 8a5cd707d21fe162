"""``python -m megatron_lossy SCRIPT arguments…``: run an unmodified Megatron-LM script with loss.

Under torchrun, mpirun or srun, for example

    torchrun --nproc-per-node 8 -m megatron_lossy pretrain_gpt.py … --p-grad 0.1 --p-param 0.1

``python -m megatron_lossy doctor`` says whether this machine is ready for that.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .config import LossyConfig, add_flags, from_namespace
from .errors import UsageError, refuse, usage_errors

if TYPE_CHECKING:
    from .hooks.install import Lossy

USAGE = (
    "usage: python -m megatron_lossy SCRIPT [Megatron's arguments] [loss flags]; --help after SCRIPT lists all; "
    "python -m megatron_lossy doctor [--help] examines this machine"
)


class _Parser(argparse.ArgumentParser):
    """A parser that knows some of the arguments and reports errors as :class:`UsageError`."""

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)

    def error(self, message: str) -> None:
        raise UsageError(message)


def parse_loss_flags(arguments: list[str]) -> LossyConfig:
    """The loss flags among Megatron's arguments, checked as far as possible before anything is imported."""
    parser = add_flags(_Parser(), LossyConfig, "loss")
    return from_namespace(LossyConfig, parser.parse_known_args(arguments)[0])


def check_channels(config: LossyConfig, arguments: list[str]) -> int | None:
    """Check files of rates and traces against the size and length of the run; returns its length if known."""
    from .channel import check_channels as check

    parser = _Parser()
    names = ("tensor-model-parallel-size", "pipeline-model-parallel-size", "train-iters")
    for name in names:
        parser.add_argument(f"--{name}", type=int)
    found = parser.parse_known_args(arguments)[0]
    world = int(os.environ.get("WORLD_SIZE", "1"))
    # Context-parallel ranks shard the optimizer too, so that they do not divide the group.
    size, rest = divmod(world, (found.tensor_model_parallel_size or 1) * (found.pipeline_model_parallel_size or 1))
    if not rest:
        check(config, size, found.train_iters)
    return found.train_iters


def main(arguments: list[str] | None = None) -> None:
    """Check the flags, install the hooks, run the script as Python would."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with usage_errors():
        if not arguments or arguments[0].startswith("-"):
            if arguments and arguments[0] in ("-h", "--help"):
                print(USAGE)
                return
            raise UsageError(USAGE)
        script, *rest = arguments
        if script == "doctor":  # a script of that name is ./doctor
            from .doctor import main as doctor

            sys.exit(doctor(rest))
        if not Path(script).is_file():
            raise refuse("SCRIPT", script, "must be a Python file, for example Megatron-LM's pretrain_gpt.py")
        config = parse_loss_flags(rest)
        steps = check_channels(config, rest)
        sys.argv = [script, *rest]
        # Before any import of megatron: the script's own Megatron must win over an installed wheel.
        sys.path[0] = str(Path(script).resolve().parent)
        lossy = _install(config, steps)
        try:
            runpy.run_path(script, run_name="__main__")
        finally:
            for observer in lossy.observers:
                observer.close()


def _install(config: LossyConfig, steps: int | None) -> Lossy:
    from . import device, hooks
    from .hooks import megatron_training
    from .hooks.ledger import Ledger

    device.prepare_import()
    try:
        import megatron.core
        import megatron.training.arguments  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"SCRIPT {sys.argv[0]}: megatron.core and megatron.training must be importable from its folder ({error}); "
            "what Megatron-LM itself imports comes with the extra megatron-lm of this package"
        ) from None
    hooks.check_version(megatron.core.__version__)
    device.prepare(megatron_training=True)
    lossy = hooks.install(config, steps)
    patches = megatron_training.flag_patches()
    if not config.lossless:
        patches += megatron_training.patches(lossy)
    Ledger("megatron.training").install(patches)
    return lossy


if __name__ == "__main__":
    main()
