"""Refusals as data: a flag, its refused companion, and the reason. One table, one order, one function that checks it.

The rows of the core are in :mod:`megatron_lossy.config.refusals`; those of a mechanism are in its folder. Those of the core
come first, in the order of :data:`megatron_lossy.base.registry.REFUSALS`, then those of
:data:`megatron_lossy.base.registry.MECHANISMS`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ..base.errors import UsageError, origin_of
from ..base.flags import shown
from ..base.registry import MECHANISMS, REFUSALS
from .facts import Facts

Config = TypeVar("Config")
_NOTHING_KNOWN = Facts()


@dataclass(frozen=True, kw_only=True)
class Refusal(Generic[Config]):
    """A flag that does not go with something.

    ``flag``: its name, or several names. With several, the refusal is about the first that was given, and does not
    apply if none was. ``beside``: the setting that it does not go with. ``why`` ends the error message. It may name
    values: ``{config.…}``, ``{facts.…}``, and the keys of ``terms``. ``value``: the text of the value in the message;
    by default the given value of a loss flag, and nothing for other flags. ``when``: whether the refusal applies. It
    must be false if a fact that it needs is ``None``.
    """

    flag: str | tuple[str, ...]
    beside: str
    why: str
    when: Callable[[Config, Facts], object]
    value: str | None = None
    terms: Callable[[Config, Facts], Mapping[str, object]] | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """All names of flags."""
        return (self.flag,) if isinstance(self.flag, str) else self.flag

    def applies(self, config: Config, facts: Facts) -> bool:
        """Whether ``config`` is refused in a run with ``facts``."""
        return bool(self.when(config, facts)) and self._given(config) is not None

    def error(self, config: Config, facts: Facts) -> Refused:
        """The error to raise if the refusal applies."""
        flag = self._given(config)
        assert flag is not None, "the refusal does not apply"
        terms = {} if self.terms is None else self.terms(config, facts)
        value = _value(config, flag) if self.value is None else self.value.format(config=config, facts=facts, **terms)
        why = self.why.format(config=config, facts=facts, **terms)
        return Refused(self, f"{flag} {value}: {why}" if value else f"{flag}: {why}")

    def cells(self) -> tuple[str, str, str]:
        """The row of a table: flags, the setting that they do not go with, and why, with an ellipsis for each value."""
        return ", ".join(self.flags), self.beside, re.sub(r"\{[^}]*\}", "…", self.why)

    def _given(self, config: Config) -> str | None:
        if isinstance(self.flag, str):
            return self.flag
        fields = type(config).__dataclass_fields__  # type: ignore[attr-defined]
        return next((flag for flag in self.flag if vars(config)[_name(flag)] != fields[_name(flag)].default), None)


class Refused(UsageError):
    """The error of a row of the table. ``refusal`` is that row."""

    def __init__(self, refusal: Refusal[Any], text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


@dataclass(frozen=True)
class Section:
    """The refusals of one mechanism, in order. ``name``: its name in the registry."""

    name: str
    about: str
    rows: tuple[Refusal[Any], ...]


def sections(ours: bool = False) -> Iterator[Section]:
    """All sections of the table, in its one order. ``ours``: without those of other packages."""
    yield from REFUSALS.ours() if ours else REFUSALS.all()
    for mechanism in MECHANISMS.ours() if ours else MECHANISMS.all():
        yield mechanism.refusals()


def check_refusals(config: Any, facts: Facts = _NOTHING_KNOWN) -> None:
    """Raise the :class:`Refused` of the first row that applies to the loss flags ``config`` in a run with ``facts``.

    Rows about typed values come before those about values of files, presets and defaults.
    """
    rows = (row for section in sections() for row in section.rows)
    refused = (row.error(config, facts) for row in rows if row.applies(config, facts))
    first = next(refused, None)
    if first is not None:
        raise first if origin_of(first) is None else next((error for error in refused if not origin_of(error)), first)


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def _value(config: Any, flag: str) -> str:
    if _name(flag) not in vars(config):
        return ""
    return shown(vars(config)[_name(flag)])
