"""A YAML file of flags, read as the command line that would set the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from ..base.errors import UsageError, cannot, note_origins, refuse
from ..base.flags import did_you_mean, flag_name, options_of


class Option(str):
    """A word of a command line that begins with dashes and was not typed. ``origin``: where it is from, in words."""

    origin: str


class _DuplicateKey(ValueError):
    """A key stands twice in a mapping."""


class _Loader(yaml.SafeLoader):
    """A loader that refuses a key that stands twice in a mapping. Dashes and underscores are the same."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            name, line = (key.tag, str(key.value).replace("_", "-")), key.start_mark.line + 1
            if name in lines and key.value != "<<":
                where = f"line {line}" if lines[name] == line else f"lines {lines[name]} and {line}"
                raise _DuplicateKey(f"has {key.value} twice in a mapping, in {where}")
            lines[name] = line
        return node


def read_yaml(flag: str, file: str | Path) -> dict[Any, Any]:
    """Return the mapping in the YAML file that ``flag`` names. Raise :class:`UsageError`."""
    try:
        content = yaml.load(Path(file).read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise cannot(flag, file, "read", error) from None
    except _DuplicateKey as error:
        raise refuse(flag, file, str(error)) from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise refuse(flag, file, f"cannot be read: {' '.join(str(error).split())}") from None
    if content is not None and not isinstance(content, dict):
        raise refuse(flag, file, "must be a mapping from names to values")
    return content or {}


def arguments_of(settings: Mapping[str, Any], classes: Sequence[type]) -> list[str]:
    """Return flags of ``classes`` (names with dashes or underscores) and their values as command-line arguments.

    Raise :class:`UsageError`.
    """
    flags: dict[str, tuple[str, bool, bool]] = {}
    for cls in classes:
        for field in dataclasses.fields(cls):
            several = "nargs" in options_of(field)
            flags[field.name] = flag_name(cls, field.name), isinstance(field.default, bool), several
    arguments: list[str] = []
    for key, value in settings.items():
        name = str(key).replace("-", "_")
        if name not in flags:
            raise UsageError(f"unknown key {key}{did_you_mean([name], flags).replace('_', '-')}")
        arguments += _one_setting(key, *flags[name], value)
    return arguments


def from_origin(words: Sequence[str], origin: str) -> list[str]:
    """Return the ``words`` of a command line, with ``origin`` as that of each flag."""
    options = [Option(word) if word.startswith("--") else word for word in words]
    for option in options:
        if isinstance(option, Option):
            option.origin = origin
    return options


def note_origins_of(words: Sequence[str], *classes: type) -> None:
    """Note the origin of each flag of ``classes`` and of ``words`` for errors. The last of equal flags counts."""
    origins = {
        flag_name(cls, field.name): "default"
        for cls in classes
        for field in dataclasses.fields(cls)
        if "flag" in field.metadata
    }
    for word in words:
        if not word.startswith("--"):
            continue
        flag = word.partition("=")[0]
        if flag not in origins:
            flag = flag.replace("--no-", "--", 1)
        if isinstance(word, Option):
            origins[flag] = word.origin
        else:
            origins.pop(flag, None)
    note_origins(origins)


def off(switch: str) -> str:
    """Return the flag that unsets ``switch``."""
    return switch.replace("--", "--no-", 1)


def _one_setting(key: str, flag: str, switch: bool, several: bool, value: Any) -> list[str]:
    if value is None:
        return []
    if switch != isinstance(value, bool):
        raise refuse(key, value, f"must be {'true or false' if switch else 'a value, not a switch (quote on and off)'}")
    if switch:
        return [flag if value else off(flag)]
    if isinstance(value, list) and not several:
        raise refuse(key, value, "must be one value, not a list")
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [flag, *map(str, value)]
    if isinstance(value, str | int | float):
        return [f"{flag}={value}"]
    raise refuse(key, value, "must be a value or a list of values")
