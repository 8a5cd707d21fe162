"""The flags that pages show: commands in their blocks, and combinations in their text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"^ *```.*?^ *```", re.DOTALL | re.MULTILINE)
#: Pages on which a flag by itself is something to type.
_ALONE = ("README.md",)


def commands(page: Path) -> Iterator[tuple[str, int, list[str]]]:
    """Yield the module, the number of ranks and the arguments of each command of ``page`` that takes loss flags."""
    for block in _BLOCK.findall(page.read_text()):
        for line in block.replace("\\\n", " ").splitlines():
            words = re.sub(r"(^|\s)#.*|--config …|[…'\"]", " ", line).split()
            for place, word in enumerate(words[:-1]):
                if word == "-m" and words[place + 1] in ("megatron_lossy", "megatron_lossy.train"):
                    yield words[place + 1], _ranks(" ".join(words[:place])), words[place + 2 :]


def _ranks(before: str) -> int:
    """Return the ranks that the words before a program start, or say that there are."""
    before = before.replace("{nodes}", "2")
    return math.prod(map(int, re.findall(r"(?:--nproc-per-node |--nnodes |WORLD_SIZE=)(\d+)", before)))


def combinations(page: Path) -> Iterator[list[str]]:
    """Yield flags with values in the text of ``page``, several at once; where one reads what to type, one as well.

    Names in the place of values, as in a table of flags, are left out.
    """
    text = re.sub(r"<!-- (flags|refusals):.*?<!-- end -->", "", _BLOCK.sub("", page.read_text()), flags=re.DOTALL)
    for code in re.findall(r"`(--[^`]+)`", text):
        words = code.replace("…", "").split()
        flags = [word for word in words if word.startswith("--")]
        several = len(flags) > 1 or (page.name in _ALONE and len(words) > 1)
        if several and words[-1] != "--udp-deadline" and not any(re.fullmatch("[A-Z]", word) for word in words):
            yield words
