"""A YAML file of flags, read as the command line that would set the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from .errors import UsageError, cannot, refuse
from .flags import did_you_mean, flag_name


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


def arguments_of(settings: Mapping[str, Any], classes: Sequence[type]) -> list[str]:
    """Flags of ``classes`` (names with dashes or underscores) and their values as command-line arguments.

    Raises :class:`UsageError`.
    """
    flags = {
        field.name: (flag_name(cls, field.name), isinstance(field.default, bool))
        for cls in classes
        for field in dataclasses.fields(cls)
    }
    arguments: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            raise UsageError(f"unknown key {key}{did_you_mean([name], flags).replace('_', '-')}")
        arguments += _one_setting(key, *flags[name], value)
    return arguments


def off(switch: str) -> str:
    """The flag that unsets ``switch``."""
    return switch.replace("--", "--no-", 1)


def _one_setting(key: str, flag: str, switch: bool, value: Any) -> list[str]:
    if value is None:
        return []
    if switch != isinstance(value, bool):
        raise UsageError(
            f"{key} {value}: must be {'true or false' if switch else 'a value, not a switch (quote on and off)'}"
        )
    if switch:
        return [flag if value else off(flag)]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [flag, *map(str, value)]
    if isinstance(value, str | int | float):
        return [f"{flag}={value}"]
    raise UsageError(f"{key} {value}: must be a value or a list of values")
