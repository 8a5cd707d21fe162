"""The parameters that a patched function must accept for its replacement, and those that it accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Takes:
    """The parameters that a replacement relies on.

    ``first``: the leading positional ones by name, with ``|`` between the names that versions give to the same one;
    ``named``: others that must exist; ``others``: more that may exist, ``None`` for any.
    """

    first: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    others: tuple[str, ...] | None = None

    def __str__(self) -> str:
        parts = [*self.first, *(f"{name}=" for name in self.named)]
        parts += ["..."] if self.others is None else [f"[{name}=]" for name in self.others]
        return f"({', '.join(parts)})"

    def fits(self, function: Callable) -> bool:
        """Whether ``function`` takes these parameters. Wrappers that take anything, as of other plug-ins, fit."""
        parameters = _parameters(function)
        if parameters is None:
            return False
        kinds = {parameter.kind for parameter in parameters}
        if inspect.Parameter.VAR_POSITIONAL in kinds and inspect.Parameter.VAR_KEYWORD in kinds:
            return True
        positional = [parameter.name for parameter in parameters if parameter.kind in _POSITIONAL]
        names = [parameter.name for parameter in parameters]
        if len(positional) < len(self.first):
            return False
        if any(found not in wanted.split("|") for found, wanted in zip(positional, self.first)):
            return False
        rest = set(names) - set(positional[: len(self.first)])
        return rest.issuperset(self.named) and (self.others is None or rest <= set(self.named) | set(self.others))


def _parameters(function: Callable) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def signature_of(function: Any) -> str:
    """The parameters of ``function`` by name, or "unknown"."""
    parameters = _parameters(function) if callable(function) else None
    if parameters is None:
        return "unknown"
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    optional = inspect.Parameter.empty
    return "({})".format(
        ", ".join(
            stars.get(parameter.kind, "") + parameter.name + ("" if parameter.default is optional else "=")
            for parameter in parameters
        )
    )
