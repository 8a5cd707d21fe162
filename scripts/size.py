"""The size of the project: lines by storey, files, words of pages, flags. ``python -m scripts.size``; tests/test_size.py has the limits."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "megatron_lossy"
#: Pages that a program writes.
GENERATED = {"flags.md", "refusals.md", "verified.md"}
#: Parts of other pages that scripts/update_docs.py writes.
_MADE = re.compile(r"<!-- \w+: \S+ -->\n.*?<!-- end -->", re.DOTALL)


def python(*folders: str) -> list[Path]:
    """Return the Python files below ``folders`` of the repository."""
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def lines(files: list[Path]) -> int:
    """Return the number of lines of ``files``, empty ones and comments included."""
    return sum(len(path.read_bytes().splitlines()) for path in files)


def outside_lab() -> list[Path]:
    """Return the Python files of the package that its own runs need: all but those in ``lab``."""
    return [path for path in python("megatron_lossy") if path.relative_to(PACKAGE).parts[0] != "lab"]


def pages() -> list[Path]:
    """Return the pages written by hand. Those of results and the generated references are not."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return top + [path for path in sorted((ROOT / "docs").glob("*.md")) if path.name not in GENERATED]


def words(page: Path) -> int:
    """Return the number of words of ``page`` that are written by hand."""
    return len(_MADE.sub("", page.read_text()).split())


def flags() -> int:
    """Return the number of loss flags."""
    from megatron_lossy.config import LossyConfig

    return len(dataclasses.fields(LossyConfig))


def help_lines() -> int:
    """Return the number of lines of the trainer's ``--help`` on a terminal of 80 columns."""
    from megatron_lossy.lab.train.arguments import make_parser

    with mock.patch.dict(os.environ, COLUMNS="80"):
        return len(make_parser("python -m megatron_lossy.train", "").format_help().splitlines())


def sizes() -> dict[str, int]:
    """Return every number by its name."""
    outside = outside_lab()
    c_files = [path for pattern in ("*.c", "*.h") for path in PACKAGE.rglob(pattern)]
    islands = python("megatron_lossy/mechanisms/islands")
    short = [path for path in python("megatron_lossy") if path.name != "__init__.py" and lines([path]) < 40]
    return {
        "entries of megatron_lossy": sum(path.suffix == ".py" or any(path.rglob("*.py")) for path in PACKAGE.iterdir()),
        "lines outside lab": lines(outside),
        "lines of the package": lines(python("megatron_lossy")),
        "lines of C": lines(c_files),
        "lines of tests": lines(python("tests")),
        "lines of scripts and benchmarks": lines(python("scripts", "benchmarks")),
        "files of islands": len(islands),
        "lines of islands": lines(islands),
        "files under 40 lines": len(short),
        "files over 450 lines": sum(lines([path]) > 450 for path in python("megatron_lossy")),
        "words of pages": sum(map(words, pages())),
        "loss flags": flags(),
        "lines of train --help": help_lines(),
    }


def main() -> None:
    """Print the table."""
    print("| what | number |\n| --- | --- |")
    for name, number in sizes().items():
        print(f"| {name} | {number:,} |")


if __name__ == "__main__":
    main()
