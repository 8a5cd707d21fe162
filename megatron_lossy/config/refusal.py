"""Refusals as data: a flag, its refused companion, and the reason. One table, one order, one function that checks it.

The rows of the core are in :mod:`megatron_lossy.config.refusals`, and come first; those of a mechanism are in its folder, in the
order of :data:`megatron_lossy.base.registry.MECHANISMS`.
"""

from __future__ import annotations

import importlib
import re
import shutil
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..base.errors import ArgumentParser, UsageError, origin_of, refuse
from ..base.flags import shown
from ..base.registry import MECHANISMS
from .facts import Facts

#: Returns whether a :class:`.LossyConfig` is refused in a run with these facts; a mapping has values that the text names.
Condition: TypeAlias = Callable[[Any, Facts], object]
_NOTHING_KNOWN = Facts()


@dataclass(frozen=True)
class Refusal:
    """A flag that does not go with something: a row of the table.

    ``flags``: its name, or several names. With several, the refusal is about the first that was given, and does not
    apply if none was. ``value``: the text of the value in the message; by default the given value of a loss flag, and
    nothing for other flags. ``beside``: the setting that it does not go with. ``why`` ends the message. ``value`` and
    ``why`` may name values: ``{config.…}``, ``{facts.…}``, and the keys of the mapping that ``when`` returns. ``when``
    must be false if a fact that it needs is ``None``.
    """

    flags: tuple[str, ...]
    value: str | None
    beside: str
    why: str
    when: Condition

    def error(self, config: Any, facts: Facts, found: object) -> RefusalError | None:
        """Return the error for ``config`` in a run with ``facts``, of which :attr:`when` returned ``found``."""
        flag = self._given(config)
        if flag is None:
            return None
        values = {"config": config, "facts": facts, **(found if isinstance(found, Mapping) else {})}
        given = shown(vars(config).get(_name(flag), ""))
        value = given if self.value is None else self.value.format(**values)
        return RefusalError(self, f"{flag} {value}".rstrip() + f": {self.why.format(**values)}")

    def cells(self) -> tuple[str, str, str]:
        """Return the row of a table: flags, the setting that excludes them, and why; an ellipsis for each value."""
        return ", ".join(self.flags), self.beside, re.sub(r"\{[^}]*\}", "…", self.why)

    def _given(self, config: Any) -> str | None:
        if len(self.flags) == 1:
            return self.flags[0]
        fields = type(config).__dataclass_fields__
        return next((flag for flag in self.flags if vars(config)[_name(flag)] != fields[_name(flag)].default), None)


class RefusalError(UsageError):
    """The error of a row of the table. ``refusal`` is that row."""

    def __init__(self, refusal: Refusal, text: str) -> None:
        super().__init__(text)
        self.refusal = refusal


class Section:
    """The refusals of one mechanism, in order. ``name``: its name in the registry. ``about``: its heading.

    ``cells``: two for each row. The first is its text, ``FLAG[, FLAG …][ = VALUE] | NOT WITH | WHY``, the second the
    condition; see :class:`Refusal`.
    """

    def __init__(self, name: str, about: str, *cells: str | Condition) -> None:
        self.name, self.about = name, about
        self.rows = tuple(_row(text, applies) for text, applies in zip(cells[::2], cells[1::2], strict=True))


def _row(text: Any, when: Any) -> Refusal:
    flags, beside, why = text.split(" | ", 2)
    names, _, value = flags.partition(" = ")
    return Refusal(tuple(names.split(", ")), value or None, beside, why, when)


def sections(ours: bool = False) -> list[Section]:
    """Return all sections of the table with rows, in its one order. ``ours``: without those of other packages."""
    mechanisms = MECHANISMS.ours() if ours else MECHANISMS.all()
    return [section for section in (*_of_core(), *(mechanism.refusals() for mechanism in mechanisms)) if section.rows]


def _of_core() -> tuple[Section, ...]:
    # By name, since that module needs this one.
    return importlib.import_module("megatron_lossy.config.refusals.core").SECTIONS


def check_refusals(config: Any, facts: Facts = _NOTHING_KNOWN) -> None:
    """Raise the :class:`RefusalError` of the first row that applies to the loss flags ``config`` in a run with ``facts``.

    Rows about typed values come before those about values of files, presets and defaults. Rows of mechanisms that the
    flags do not ask for (:attr:`.Flags.triggers`) cannot apply.
    """
    first = None
    known = {name for name, value in vars(facts).items() if value is not None}
    asked = [
        mechanism
        for mechanism in MECHANISMS.all()
        if mechanism.Flags in config.used or known & {*mechanism.Flags.trigger_facts}
    ]
    for section in (*_of_core(), *(mechanism.refusals() for mechanism in asked)):
        for row in section.rows:
            found = row.when(config, facts)
            error = row.error(config, facts, found) if found else None
            if error is not None and origin_of(error) is None:
                raise error
            first = first or error
    if first is not None:
        raise first


def _name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


# --- in the terminal -------------------------------------------------------------------------------------------------

#: The names of the columns.
HEAD = ("flag", "not with", "why")


def main(arguments: list[str]) -> None:
    """``python -m megatron_lossy refusals``: print the table, or some of its sections."""
    known = {section.name: section for section in sections()}
    parser = ArgumentParser(
        prog="python -m megatron_lossy refusals",
        description="List which flags do not go together, in the order in which they are checked. The ellipsis is a value.",
    )
    parser.add_argument("section", nargs="*", metavar="SECTION", help=", ".join(known))
    chosen = parser.parse_args(arguments).section or list(known)
    for name in chosen:
        if name not in known:
            raise refuse("SECTION", name, "must be one of " + ", ".join(known))
    width = shutil.get_terminal_size((120, 24)).columns
    print("\n\n".join(as_text(known[name], width) for name in chosen))


def as_text(section: Section, width: int) -> str:
    """Return ``section`` for a terminal: a paragraph for each row."""
    rows = (
        textwrap.fill(" | ".join(row.cells()), width, subsequent_indent="    ", break_on_hyphens=False)
        for row in section.rows
    )
    return "\n".join([f"{section.about} ({section.name})", " | ".join(HEAD), *rows])
