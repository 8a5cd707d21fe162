"""The table of refusals in the terminal."""

from __future__ import annotations

import itertools
import shutil
import textwrap
from collections.abc import Sequence

from ...base.errors import ArgumentParser, refuse
from ..refusal import Section, sections

#: The names of the columns.
HEAD = ("flag", "not with", "why")
#: Share of the width that each column of the terminal gets.
_SHARES = (0.3, 0.28, 0.42)


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
    """``section`` as a table of three columns for a terminal."""
    widths = [max(16, int(share * width) - 2) for share in _SHARES]
    lines = [f"{section.about} ({section.name})", *_lines(HEAD, widths), "  ".join("-" * one for one in widths)]
    for row in section.rows:
        lines += _lines(row.cells(), widths)
    return "\n".join(lines)


def _lines(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    wrapped = [textwrap.wrap(cell, width, break_on_hyphens=False) for cell, width in zip(cells, widths, strict=True)]
    return [
        "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()
        for parts in itertools.zip_longest(*wrapped, fillvalue="")
    ]
