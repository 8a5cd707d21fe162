"""The command line and the YAML file, read into the two configurations.

A YAML file is a mapping from flag names (with dashes or underscores) to values. The command line wins over it, and it wins
over a preset of loss flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from ...base.errors import ArgumentParser, Collector, UsageError, errors_in
from ...base.flags import add_flags, flag_groups, flag_help, flag_name, from_namespace
from ...config import LossyConfig
from ...config.loss_flags import add_loss_flags, help_loss, preset_arguments
from ...config.settings import arguments_of, from_origin, note_origins_of, off, read_yaml
from ...config.shipped import find_config
from .config import REQUIRED, TrainConfig


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of every training and loss flag, and ``--config``. Its help shows the basic flags."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [flags]",  # not the names of all
        description=description,
        epilog="A switch that is on is unset by --no-NAME, for example --no-bf16.",
        formatter_class=functools.partial(argparse.HelpFormatter, max_help_position=34),
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="defaults of flags; the command line wins")
    every = "show every flag and exit"
    parser.add_argument("--help-all", nargs=0, action=_HelpAll, default=argparse.SUPPRESS, help=every)
    add_flags(parser, TrainConfig, "training", "names as in Megatron-LM", short=True)
    add_loss_flags(parser, "lossy exchange")
    for cls in (TrainConfig, LossyConfig):
        for switch in dataclasses.fields(cls):
            if isinstance(switch.default, bool):
                hidden: dict[str, Any] = dict.fromkeys(("default", "help"), argparse.SUPPRESS)
                parser.add_argument(off(flag_name(cls, switch.name)), dest=switch.name, action="store_false", **hidden)
    return parser


class _HelpAll(argparse.Action):
    """Prints the help of every flag, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        print(flag_help(TrainConfig, "training", flag_groups(TrainConfig)), help_loss("all"), sep="\n\n")
        parser.exit()


def read_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """Return ``arguments`` over their ``--config`` file, preset and defaults. Raise :class:`UsageError`."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file = first.parse_known_args(arguments)[0].config
    below = preset_arguments(arguments)
    namespace = parser.parse_args(below)
    if file is not None:
        settings = read_yaml("--config", find_config(file))
        with errors_in(f"--config {file}"):
            words = arguments_of(settings, (TrainConfig, LossyConfig))
            namespace = parser.parse_args(words, namespace)
        below += from_origin(words, f"from {file}")
        given = parser.parse_args(arguments)
        if given.data_path and not given.data:
            namespace.data = None  # the command line's data replaces the file's
    note_origins_of([*below, *arguments], TrainConfig, LossyConfig)
    return parser.parse_args(arguments, namespace)


def configurations(namespace: argparse.Namespace) -> tuple[TrainConfig, LossyConfig]:
    """Return the two configurations in a namespace. Raise :class:`UsageError`."""
    missing = [flag_name(TrainConfig, name) for name in REQUIRED if getattr(namespace, name) is None]
    if missing and namespace.config is None:
        why = "needs a file, for example configs/tiny/llama_1m.yaml, or all of what is missing:"
        raise UsageError(f"--config: {why} {' '.join(missing)}")
    problems, made = Collector(), []
    for cls in (TrainConfig, LossyConfig):
        with problems.noting():
            made.append(from_namespace(cls, namespace))
    problems.finish()
    return made[0], made[1]
