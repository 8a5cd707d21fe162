"""Refuse idioms that are no plain English: in docstrings, comments, strings and pages. A part of ``make lint``.

``python -m scripts.words [FILE...]``; without files, all that git has, but for results.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: The beginning of a sentence, or of an item of a list.
BEGIN = r"(?:\A|[.!?:]\s+|\n\s*\n\s*)(?:[-*] +)?"
THIRD = "Add|Call|Complete|Doe|Give|Make|Prove|Raise|Replace|Restore|Return|Run|Say|Send|Take|Train|Wait|Wrap|Write"
#: Idioms, and the better form of each.
REFUSED = {
    BEGIN + r"(?:Who|What)(?:ever)?\b(?![^?.]*\?)": "begin with the noun: 'Packets that arrive', 'A rank that waits'",
    r"\bbeside\b": "write 'besides', 'along with' or 'while'; of a place, 'next to'",
    r"\b(?:hears?|heard)\b": "a rank 'receives' something, or gets no message",
    r"\b(?:tells?|telling|told)\b": "code 'reports', 'prints' or 'distinguishes'; a rank 'sends'",
    r"(?<!you )\b(?:knows?|knew)\b": "code 'has', 'reads', 'records' or 'can compute' something",
    r"\bg[ia]v(?:es?|ing)\s+up\b": "code 'stops waiting', 'fails' or 'ends'",
    r"\bsa(?:ys?|id|ying)\s+nothing\b": "code 'prints nothing', a page 'does not mention' something",
}
#: The same at the beginning of a function's docstring.
OPENINGS = {
    r"\A(?:Whether|How|Why|Where|Which)\b": "begin with the verb: 'Return whether', 'Return how many'",
    rf"\A(?:{THIRD})s\b": "write the imperative: 'Return', not 'Returns'",
}
#: Texts of files that are not Python, and the marks in them that are no words.
BLOCKS = {
    ".md": (r".+", r"^```.*?^```|`[^`]*`|\]\([^)]*\)"),
    ".c": (r"/\*.*?\*/|(?:^[^\n\"]*//[^\n]*\n)+", r"/\*+|\*+/|^[^\n]*//|^\s*\*"),
    ".yaml": (r"(?:^[^\n]*#[^\n]*\n)+", r"^[^\n]*?#"),
}
KINDS = {".h": ".c", ".cpp": ".c", ".cc": ".c", ".yml": ".yaml", ".sh": ".yaml", ".toml": ".yaml", "": ".yaml"}


def of_python(source: str) -> Iterator[tuple[int, str, bool]]:
    """Yield line and text of each string and comment of ``source``, and whether it is a function's docstring."""
    functions = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef) and "property" not in "".join(map(ast.unparse, node.decorator_list)):
            functions.add(node.body[0].lineno)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.lineno, re.sub(r"``.*?``", "x", node.value).lstrip(), node.lineno in functions
    first, lines = 0, []
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        if token.type == tokenize.COMMENT:
            first = first if lines else token.start[0]
            lines.append(token.string.lstrip("#: "))
        elif token.type != tokenize.NL and lines:
            yield first, "\n".join(lines), False
            lines = []


def of_others(source: str, kind: str) -> Iterator[tuple[int, str, bool]]:
    """Yield the same of a file of the ``kind`` ``.md``, ``.c`` or ``.yaml``."""
    texts, marks = (re.compile(pattern, re.DOTALL | re.MULTILINE) for pattern in BLOCKS[kind])
    for text in texts.finditer(source):
        words = marks.sub(lambda mark: "\n" * mark[0].count("\n"), text[0])
        yield source.count("\n", 0, text.start()) + 1, words.lstrip(" "), False


def found(path: Path) -> Iterator[str]:
    """Yield a line for each refused idiom of the file ``path``."""
    source, kind = path.read_text(), KINDS.get(path.suffix, path.suffix)
    for line, text, opening in of_python(source) if kind == ".py" else of_others(source, kind):
        for pattern, better in (REFUSED | OPENINGS if opening else REFUSED).items():
            for match in re.finditer(pattern, text):
                row = line + text.count("\n", 0, match.end())
                yield f"{path}:{row}: '{' '.join(match[0].split())}': {better}"


def main() -> int:
    """Print the idioms of the files that ``sys.argv`` names; return 1 if there are any."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    files = [Path(name) for name in sys.argv[1:] or listed if not name.startswith("benchmarks/results/")]
    kinds = {".py", *BLOCKS, *KINDS}
    lines = [
        line
        for path in files
        if path.is_file() and path.suffix in kinds and path.name != "words.py"
        for line in found(path)
    ]
    print(*lines, sep="\n" if lines else "", end="\n" if lines else "")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
