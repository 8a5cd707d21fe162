"""A configuration file for the launcher: one source of flags for Megatron-LM's scripts and for our trainer.

A YAML file holds flags of ``python -m megatron_lossy.train`` under their names. Three keys are the launcher's own:

* ``base``: another such file, beside this one, whose settings this one changes;
* ``launch``: flags of ``python -m megatron_lossy.launch``, for example ``device`` and ``accelerators``;
* ``megatron``: flags that only Megatron-LM has; they win over what is translated from the others.

A file without these keys works with ``--config`` of the trainer as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import refuse
from ..settings import read_yaml
from ..shipped import find_config

_OWN = ("launch", "megatron")


@dataclass(frozen=True)
class Recipe:
    """The content of a file and its bases: trainer flags, launcher flags, Megatron flags, by name with dashes."""

    settings: dict[str, Any] = field(default_factory=dict)
    launch: dict[str, Any] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)

    def over(self, base: Recipe) -> Recipe:
        """These settings if they are given, else those of ``base``."""
        return Recipe(base.settings | self.settings, base.launch | self.launch, base.megatron | self.megatron)


def read_recipe(file: str | Path, above: tuple[Path, ...] = ()) -> Recipe:
    """The configuration ``file`` over its bases. Raises :class:`UsageError` that names the file."""
    path = find_config(file)
    content = {str(key).replace("_", "-"): value for key, value in read_yaml("--config", path).items()}
    base = content.pop("base", None)
    own = {name: _section(path, name, content.pop(name, None)) for name in _OWN}
    recipe = Recipe(content, **own)
    if base is None:
        return recipe
    below = path.parent / str(base)
    if below.resolve() in (path.resolve(), *above):
        raise refuse("--config", file, f"base {base} leads back to it")
    return recipe.over(read_recipe(below, (path.resolve(), *above)))


def flag_arguments(section: Mapping[str, Any], where: str) -> list[str]:
    """Flags and values as command-line arguments; ``true`` is a switch, ``false`` leaves the flag out.

    Raises :class:`UsageError` that names ``where``.
    """
    arguments: list[str] = []
    for name, value in section.items():
        flag = f"--{name}"
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(flag)
        elif isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
            arguments += [flag, *map(str, value)]
        elif isinstance(value, str | int | float):
            arguments += [flag, str(value)]
        else:
            raise refuse(where, f"{name} {value}", "must be a value, a list of values, or true")
    return arguments


def _section(path: Path, name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise refuse("--config", path, f"{name} must be a mapping from flag names to values")
    return {str(key).replace("_", "-"): item for key, item in value.items()}
