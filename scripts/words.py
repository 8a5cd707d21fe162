"""Refuse idioms that are no plain English, in docstrings, comments, strings and pages: a part of ``make lint``.

``python -m scripts.words [FILE...]``; without files, all of the repository but results.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

BEGIN = r"(?:\A|[.!?:]\s+|\n\s*\n\s*)(?:[-*] +)?"
THIRD = "Add|Call|Complete|Doe|Give|Make|Prove|Raise|Replace|Restore|Return|Run|Say|Send|Take|Train|Wait|Wrap|Write"
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
#: Idioms at the beginning of a function's docstring; the last of them only if the function returns a value.
OPENINGS = {
    r"\A(?:Whether|How|Why|Where|Which)\b": "begin with the verb: 'Return whether', 'Return how many'",
    rf"\A(?:{THIRD})s\b": "write the imperative: 'Return', not 'Returns'",
    r"\A(?:The|An?|All|Every|Each|Its|Their)\b": "begin with the verb: 'Return the', 'Yield the'",
}
#: Texts by suffix, and the marks in them that are no words.
COMMENTS = r"/\*.*?\*/|(?:^[^\n\"]*?(?:#|//)[^\n]*\n)+", r"^[^\n]*?(?:#|//)|/\*+|\*+/|^\s*\*"
TEXTS = dict.fromkeys((".c", ".h", ".cc", ".cpp", ".yaml", ".yml", ".toml", ".sh", ""), COMMENTS)
TEXTS[".md"] = ".+", r"^```.*?^```|`[^`]*`|\]\([^)]*\)"


def of_python(source: str) -> Iterator[tuple[int, str, int]]:
    """Yield line and text of each string and comment of ``source``, and the number of openings that are refused."""
    openings: dict[int, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            noun = re.search("property|fixture", "".join(map(ast.unparse, node.decorator_list)))
            returns = node.returns is not None and ast.unparse(node.returns) != "None"
            openings[node.body[0].lineno] = 0 if noun else 2 + returns
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 2:
            yield node.lineno, re.sub(r"``.*?``", "x", node.value).lstrip(), openings.get(node.lineno, 0)
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source + "\n").readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("#: "))
        elif token.type != tokenize.NL and comment:
            yield token.start[0] - len(comment), "\n".join(comment), 0
            comment = []


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
    texts = [path for path in paths if path.suffix in (".py", *TEXTS) and path.name != Path(__file__).name]
    sys.exit("\n".join(line for path in texts if path.is_file() for line in refused(path)))
