"""The loss flags on a command line: few of them in ``--help``, all in ``--help-loss``, several at once by a preset.

A preset is a YAML file of loss flags in ``configs/presets``. The order is: defaults, preset, ``--config`` file, command line.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from ..base.errors import ArgumentParser, errors_in, refuse
from ..base.flags import add_flags, did_you_mean, flag_groups, flag_help
from . import LossyConfig
from .settings import arguments_of, from_origin, read_yaml
from .shipped import find_config, shipped_folder

Parser = TypeVar("Parser", bound=argparse.ArgumentParser)
PRESET = "--loss-preset"


def add_loss_flags(parser: Parser, title: str) -> Parser:
    """Add all loss flags to ``parser``, with those alone in its help that a newcomer needs. Return ``parser``."""
    add_flags(parser, LossyConfig, title, short=True)
    add_preset_and_help(parser.add_argument_group(f"{title}: more"))
    return parser


def add_preset_and_help(parser: Any) -> None:
    """Add ``--loss-preset`` and ``--help-loss`` to a parser, or to a group of one."""
    parser.add_argument(
        PRESET,
        metavar="NAME",
        default=argparse.SUPPRESS,
        help=f"loss flags of a preset ({', '.join(presets())}) or a YAML file; a --config file and the command line win",
    )
    parser.add_argument(
        "--help-loss",
        metavar="SECTION",
        nargs="?",
        const="all",
        action=_HelpLoss,
        default=argparse.SUPPRESS,
        help="show all loss flags of a section and exit; or of all sections, or the presets",
    )


class _HelpLoss(argparse.Action):
    """Prints what ``--help`` leaves out, and ends the program."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: str | None = None) -> None:
        """Called by argparse with the name of a section."""
        print(help_loss(values))
        parser.exit()


def sections() -> dict[str, str]:
    """Return the headings of the loss flags by their names on the command line: ``what-is-lost`` is "what is lost"."""
    return {heading.replace(",", "").replace(" ", "-"): heading for heading in flag_groups(LossyConfig)}


def help_loss(section: str) -> str:
    """Return the help of a section, of ``all``, or the list of ``presets``. Raise :class:`UsageError`."""
    named = sections()
    if section == "presets":
        return "\n".join([f"{PRESET} NAME:", *(f"  {name:<12}{title(name)}" for name in presets())])
    if section == "all":
        return flag_help(LossyConfig, "loss", named.values())
    if section not in named:
        known = ["all", "presets", *named]
        raise refuse("--help-loss", section, f"must be one of {', '.join(known)}{did_you_mean([section], known)}")
    return flag_help(LossyConfig, "loss", [named[section]])


def presets() -> list[str]:
    """Return the names of the presets that come with the package."""
    return sorted(file.stem for file in (shipped_folder("configs") / "presets").glob("*.yaml"))


def title(preset: str) -> str:
    """Return the first line of ``preset``, its description."""
    first, *_ = find_preset(preset).read_text(encoding="utf-8").splitlines()
    return first.removeprefix("#").strip()


def find_preset(name: str) -> Path:
    """Return the file of the preset ``name``, or the YAML file of that name. Raise :class:`UsageError`."""
    known = presets()
    if name in known:
        return shipped_folder("configs") / "presets" / f"{name}.yaml"
    file = find_config(name)
    if not file.is_file():
        raise refuse(PRESET, name, f"must be a file or one of {', '.join(known)}{did_you_mean([name], known)}")
    return file


def preset_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the flags of the preset that ``arguments`` name, as command-line arguments. Raise :class:`UsageError`."""
    return _split(arguments)[0]


def with_preset(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with the flags of the preset that they name in the place of its name; their own flags win.

    Raise :class:`UsageError`.
    """
    preset, others = _split(arguments)
    return [*preset, *others]


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    if not any(word.partition("=")[0] == PRESET for word in arguments):
        return [], list(arguments)
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(PRESET, dest="preset")
    found, others = parser.parse_known_args(arguments)
    origin = f"of the preset {found.preset}" if found.preset in presets() else f"from {found.preset}"
    settings = read_yaml(PRESET, find_preset(found.preset))
    with errors_in(f"{PRESET} {found.preset}"):
        # A switch that is off is left out: no loss flag is on by default.
        words = arguments_of({key: value for key, value in settings.items() if value is not False}, [LossyConfig])
        add_flags(ArgumentParser(add_help=False, allow_abbrev=False), LossyConfig, "loss").parse_args(words)
    return from_origin(words, origin), others
