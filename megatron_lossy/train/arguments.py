"""The command line and the YAML file, read into the two configurations.

A YAML file is a mapping from flag names (with dashes or underscores) to values; the command line wins.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..config import LossyConfig
from ..errors import ArgumentParser, UsageError, cannot, refuse
from ..flags import add_flags, did_you_mean, flag_name, from_namespace
from ..shipped import find_config
from .config import REQUIRED, TrainConfig


def make_parser(prog: str, description: str) -> argparse.ArgumentParser:
    """A parser of every training and loss flag, and ``--config``."""
    parser = ArgumentParser(
        prog=prog,
        usage=f"{prog} [--config FILE.yaml] [flags]",  # not the names of all
        description=description,
        epilog="A switch that is on, or that the YAML file sets, is unset by --no-NAME, for example --no-bf16.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE.yaml", help="defaults of all flags below; the command line wins")
    add_flags(parser, TrainConfig, "training", "names as in Megatron-LM")
    add_flags(parser, LossyConfig, "lossy exchange")
    for cls in (TrainConfig, LossyConfig):
        for switch in dataclasses.fields(cls):
            if isinstance(switch.default, bool):
                parser.add_argument(
                    _off(flag_name(cls, switch.name)),
                    dest=switch.name,
                    action="store_false",
                    default=argparse.SUPPRESS,
                    help=argparse.SUPPRESS,
                )
    return parser


def _off(switch: str) -> str:
    """The flag that unsets ``switch``."""
    return switch.replace("--", "--no-", 1)


def read_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """``arguments`` over the ``--config`` file they name, over the defaults. Raises :class:`UsageError`."""
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--config")
    file = first.parse_known_args(arguments)[0].config
    namespace = None
    if file is not None:
        settings = read_yaml("--config", find_config(file))
        try:
            namespace = parser.parse_args(setting_arguments(settings))
        except UsageError as error:
            raise UsageError(f"--config {file}: {error}") from None
        given = parser.parse_args(arguments)
        if given.data_path and not given.data:
            namespace.data = None  # the command line's data replaces the file's
    return parser.parse_args(arguments, namespace)


def configurations(namespace: argparse.Namespace) -> tuple[TrainConfig, LossyConfig]:
    """The two configurations in a namespace. Raises :class:`UsageError`."""
    missing = [flag_name(TrainConfig, name) for name in REQUIRED if getattr(namespace, name) is None]
    if missing and namespace.config is None:
        why = "needs a file, for example configs/tiny/llama_1m.yaml, or all of what is missing:"
        raise UsageError(f"--config: {why} {' '.join(missing)}")
    return from_namespace(TrainConfig, namespace), from_namespace(LossyConfig, namespace)


def read_yaml(flag: str, file: str | Path) -> dict[Any, Any]:
    """The mapping in the YAML file that ``flag`` names. Raises :class:`UsageError`."""
    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise cannot(flag, file, "read", error) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise refuse(flag, file, f"cannot be read: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise refuse(flag, file, "must be a mapping from names to values")
    return content or {}


def setting_arguments(settings: Mapping[str, Any]) -> list[str]:
    """Flag names (with dashes or underscores) and their values as command-line arguments.

    Raises :class:`UsageError`.
    """
    flags = {
        field.name: (flag_name(cls, field.name), isinstance(field.default, bool))
        for cls in (TrainConfig, LossyConfig)
        for field in dataclasses.fields(cls)
    }
    arguments: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            raise UsageError(f"unknown key {key}{did_you_mean([name], flags).replace('_', '-')}")
        arguments += _one_setting(key, *flags[name], value)
    return arguments


def _one_setting(key: str, flag: str, switch: bool, value: Any) -> list[str]:
    if value is None:
        return []
    if switch != isinstance(value, bool):
        raise UsageError(
            f"{key} {value}: must be {'true or false' if switch else 'a value, not a switch (quote on and off)'}"
        )
    if switch:
        return [flag if value else _off(flag)]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [flag, *map(str, value)]
    if isinstance(value, str | int | float):
        return [f"{flag}={value}"]
    raise UsageError(f"{key} {value}: must be a value or a list of values")
