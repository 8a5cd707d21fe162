"""Write the table of flags, made from megatron_lossy/config.py, into README.md; --check only says whether it is there."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from megatron_lossy.config import LossyConfig, flag_table

README = Path(__file__).parent.parent / "README.md"
BEGIN, END = "<!-- flags: make flags -->\n", "<!-- end of flags -->"


def with_flags(text: str) -> str:
    """``text`` of the README with the current table between the marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return before + BEGIN + flag_table(LossyConfig) + "\n" + END + after


def main() -> None:
    """Update the README, or check it."""
    text = README.read_text()
    if text == with_flags(text):
        return
    if "--check" in sys.argv:
        sys.exit("README.md: the table of flags is not that of megatron_lossy/config.py; run make flags")
    aside = README.with_suffix(".tmp")
    aside.write_text(with_flags(text))
    os.replace(aside, README)


if __name__ == "__main__":
    main()
