"""The table of refusals in the terminal."""

from __future__ import annotations

import shutil
import textwrap

from ...base.errors import ArgumentParser, refuse
from ..refusal import Section, sections

#: The names of the columns.
HEAD = ("flag", "not with", "why")


def main(arguments: list[str]) -> None:
    """``python -m megatron_lossy refusals``: print the table, or some of its sections."""
    known = {section.name: section for section in sections() if section.rows}
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
