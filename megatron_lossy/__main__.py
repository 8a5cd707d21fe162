"""``python -m megatron_lossy SCRIPT arguments…``: run an unmodified Megatron-LM script with loss.

Under torchrun, mpirun or srun, for example

    torchrun --nproc-per-node 8 -m megatron_lossy pretrain_gpt.py … --p-grad 0.1 --p-param 0.1

``python -m megatron_lossy doctor`` checks whether this machine is ready for that. ``python -m megatron_lossy refusals``
lists the flags that do not go together. Without a checkout of this project, ``python -m megatron_lossy copy FOLDER``
puts the configurations, the launchers' scripts and the patches into FOLDER. ``python -m megatron_lossy coordinator`` serves
the store in which islands agree on their members.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

from .base.errors import ArgumentParser, UsageError, lab_module, refuse
from .base.flags import did_you_mean
from .config.loss_flags import with_preset
from .config.shipped import copy_shipped
from .plugin import check_command_line, install, parse_loss_flags, running

USAGE = (
    "usage: python -m megatron_lossy SCRIPT [Megatron's arguments] [loss flags]; --help after SCRIPT lists most, "
    "--help-loss all loss flags and presets; "
    "python -m megatron_lossy plan [--help] says how to train over a link between sites; "
    "python -m megatron_lossy doctor [--help] examines this machine, or such a link; "
    "python -m megatron_lossy export FOLDER --hf OUT makes a model of transformers of a checkpoint of our trainer; "
    "python -m megatron_lossy refusals [SECTION] lists which flags do not go together; "
    "python -m megatron_lossy copy FOLDER puts configurations and the launchers' scripts there; "
    "python -m megatron_lossy coordinator [--help] serves the store in which islands agree on their members"
)

#: The modules of commands whose code is not in the lab.
_OWN = {"refusals": "config.refusal", "coordinator": "mechanisms.islands.membership.coordinator"}
_COMMANDS = ("plan", "doctor", "export", "refusals", "copy", "coordinator")


def main(arguments: list[str] | None = None) -> None:
    """Check the flags, install the hooks, run the script as Python would."""
    arguments = sys.argv[1:] if arguments is None else arguments
    with running():
        if not arguments or arguments[0].startswith("-"):
            if arguments and arguments[0] in ("-h", "--help"):
                print(USAGE)
                return
            if arguments and arguments[0].partition("=")[0] == "--help-loss":
                parse_loss_flags(arguments)  # which prints and exits
            raise UsageError(USAGE)
        script, *rest = arguments
        if script in ("doctor", "export", "plan"):  # a script of that name is ./doctor
            sys.exit(lab_module(script, script).main(rest))
        if script in _OWN:
            importlib.import_module(f"{__package__}.{_OWN[script]}").main(rest)
            return
        if script == "copy":
            _copy(rest)
            return
        if not Path(script).is_file():
            allowed = (
                f"must be a Python file, for example Megatron-LM's pretrain_gpt.py, or one of {', '.join(_COMMANDS)}"
            )
            raise refuse("SCRIPT", script, allowed + did_you_mean([script], _COMMANDS))
        rest = with_preset(rest)
        config = parse_loss_flags(rest)
        steps = check_command_line(config, rest)
        sys.argv = [script, *rest]
        # Before any import of megatron: the script's own Megatron must win over an installed wheel.
        sys.path[0] = str(Path(script).resolve().parent)
        _import_megatron(script)
        install(config, steps)
        runpy.run_path(script, run_name="__main__")


def _copy(arguments: list[str]) -> None:
    parser = ArgumentParser(
        prog="python -m megatron_lossy copy",
        description="Copy configurations, the launchers' scripts and patches into a folder.",
    )
    parser.add_argument("folder", metavar="FOLDER")
    for folder in copy_shipped(parser.parse_args(arguments).folder):
        print(folder)


def _import_megatron(script: str) -> None:
    from .base import device

    device.prepare_import()
    try:
        import megatron.training.arguments  # noqa: F401
    except ImportError as error:
        from .hooks.versions import how_to_import

        raise UsageError(
            f"SCRIPT {script}: megatron.core and megatron.training must be importable from its folder ({error}); "
            f"{how_to_import(error)}"
        ) from None


if __name__ == "__main__":
    main()
