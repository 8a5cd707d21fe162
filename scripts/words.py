"""Refuse idioms that are no plain English, in code and pages: ``python -m scripts.words [FILE...]``, by default all files."""

import ast
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BEGIN = r"(?:\A|[.!?:]\s+|\n\s*\n\s*)(?:[-*] +)?"
THIRD = "Add|Complete|Doe|Give|Make|Prove|Raise|Replace|Restore|Return|Say|Send|Take|Train|Wrap"
#: Idioms in any text, and the better form of each.
REFUSED = {
    BEGIN + r"(?:Who|What)(?:ever)?\b(?![^?.]*\?)": "begin with the noun: 'Packets that arrive', 'A rank that waits'",
    r"(?i)\bbeside\b": "write 'besides', 'along with' or 'while'; of a place, 'next to'",
    r"(?i)\b(?:hears?|heard)\b": "a rank 'receives' something, or gets no message",
    r"(?i)\b(?:tells?|telling|told)\b": "code 'reports', 'prints' or 'distinguishes'; a rank 'sends'",
    r"(?i)(?<!you )\b(?:knows?|knew)\b": "code 'has', 'reads', 'records' or 'can compute' something",
    r"(?i)\bg[ia]v(?:es?|ing)\s+up\b": "code 'stops waiting', 'fails' or 'ends'",
    r"(?i)\bsa(?:ys?|id|ying)\s+nothing\b": "code 'prints nothing', a page 'does not mention' something",
}
#: Idioms at the beginning of any docstring; of a function's, unless a noun describes it; and if it returns a value.
OPENINGS = {
    r"\A(?:Whose|How|Why|Where|Which|Of)\b": "begin with a noun or a verb: 'Return how many', 'Shares of'",
    rf"\A(?:Whether\b|(?:{THIRD})s\b)": "write the imperative: 'Return whether', 'Return', not 'Returns'",
    r"\A(?:The|An?|All|Every|Each|Its|Their)\b": "begin with the verb: 'Return the', 'Yield the'",
}
#: Texts by suffix, and the marks in them that are no words.
C_COMMENTS = r"/\*.*?\*/|(?:^[^\n\"]*?//[^\n]*\n)+", r"^[^\n]*?//|/\*+|\*+/|^\s*\*|`[^`]*`"
TEXTS = dict.fromkeys((".c", ".h", ".cc", ".cpp"), C_COMMENTS)
TEXTS |= dict.fromkeys((".yaml", ".yml", ".toml", ".sh", ""), (r"(?:^[^\n\"]*?#[^\n]*\n)+", r"^[^\n]*?#|`[^`]*`"))
TEXTS[".md"] = ".+", r"^```.*?^```|^#[^\n]*|`[^`]*`|!\[[^]]*\]|\]\([^)]*\)"


def of_python(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield line and text of each string and comment of ``source``, and the number of openings that are refused."""
    openings: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node):
            decorators = " ".join(map(ast.unparse, getattr(node, "decorator_list", [])))
            function = isinstance(node, ast.FunctionDef) and not re.search("property|fixture", decorators)
            returns = ast.unparse(getattr(node, "returns", None) or ast.Constant(None)) != "None"
            openings[node.body[0].lineno] = 2 + returns if function else 1
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            text, docstring = re.sub(r"`+[^`]*`+", "x", node.value).lstrip(), openings.get(node.lineno, 0)
            if docstring or len(text.split()) > 2:  # else it is a name
                yield node.lineno, text, docstring
    comment: dict[int, str] = {}
    for token in tokenize.generate_tokens(iter([*source.splitlines(True), "\n"]).__next__):
        if token.type == tokenize.COMMENT:
            comment[token.start[0]] = token.string.lstrip("#: ")
        elif token.type != tokenize.NL and comment:
            yield min(comment), "\n".join(comment.values()), 0
            comment = {}


def of_others(source: str, suffix: str) -> Iterator[tuple[int, str, int]]:
    """Yield the same of a file that is not Python."""
    texts, marks = (re.compile(pattern, re.DOTALL | re.MULTILINE) for pattern in TEXTS[suffix])
    for text in texts.finditer(source):
        words = marks.sub(lambda mark: "\n" * mark[0].count("\n"), text[0])
        yield source.count("\n", 0, text.start()) + 1, words.lstrip(" "), 0


def refused(path: Path) -> Iterator[str]:
    """Yield a line for each idiom in the file ``path``."""
    texts = of_python(path.read_text()) if path.suffix == ".py" else of_others(path.read_text(), path.suffix)
    for line, text, openings in texts:
        for pattern, better in [*REFUSED.items(), *list(OPENINGS.items())[:openings]]:
            for match in re.finditer(pattern, text):
                row = line + text.count("\n", 0, match.end())
                yield f"{path}:{row}: '{' '.join(match[0].split())}': {better}"


if __name__ == "__main__":
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True).stdout.split("\n")
    paths = map(Path, sys.argv[1:] or [name for name in listed if not name.startswith("benchmarks/results/")])
    texts = [
        path for path in paths if path.suffix in (".py", *TEXTS) and path.name not in ("words.py", "test_scripts.py")
    ]
    sys.exit("\n".join(line for path in texts if path.is_file() for line in refused(path)) or None)
