"""Count how many small slips in the core the tests notice (make mutants).

    python scripts/mutants.py [--count 20] [--seed 27] [--rooms recovery channel …]

A slip changes one place: a comparison, a sum or product, ``and`` or ``or``, a number, ``True`` or ``False``, or leaves out a ``not``.
Places are drawn at random over the rooms, and each slip is made in a copy of this checkout. There the tests of its room run,
those of ``make test``, until one fails. Annotations and errors are left alone.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "megatron_lossy"
HOLDERS = ("base", "config", "run", "mechanisms", "lab")  # of rooms
ROOMS = ("recovery", "channel", "transport", "mechanisms", "hooks", "delivery_log", "base/coding")
_OPERATORS = {
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"),
    ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "//"), ast.Div: ("/", "*"), ast.FloorDiv: ("//", "*"), ast.Mod: ("%", "//"),
    ast.And: ("and", "or"), ast.Or: ("or", "and"),
}  # fmt: skip
_TIER = "not programs and not slow and not nightly and not slurm"


@dataclass(frozen=True)
class Mutant:
    """A slip: the bytes of ``file`` from ``begin`` to ``end`` become ``after``."""

    file: str
    begin: int
    end: int
    after: str

    def source(self, root: Path) -> bytes:
        """Return the changed module."""
        source = (root / self.file).read_bytes()
        return source[: self.begin] + self.after.encode() + source[self.end :]

    def told(self, root: Path) -> str:
        """Return its place, and the line before and after."""
        old, new = (root / self.file).read_bytes(), self.source(root)
        line = old[: self.begin].count(b"\n")
        before, after = (text.decode().splitlines()[line].strip() for text in (old, new))
        return f"{self.file}:{line + 1}: {before}  ->  {after}"


def room_of(file: str) -> str:
    """Return the room of the tests of ``file``; see ``tests/rooms.py``."""
    parts = Path(file).with_suffix("").parts
    return parts[2] if parts[1] in HOLDERS and len(parts) > 3 else parts[1]


def _nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield all nodes of ``tree`` but annotations and texts for people."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            told = isinstance(child, ast.Raise | ast.JoinedStr)
            told = told or (isinstance(child, ast.FunctionDef) and child.name in ("__repr__", "__str__"))
            if isinstance(child, ast.AST) and not told:
                yield child
                yield from _nodes(child)


def slips(file: str, source: str) -> Iterator[Mutant]:
    """Yield every slip of a module."""
    starts = [0]
    for line in source.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def begin(node: ast.expr) -> int:
        return starts[node.lineno - 1] + node.col_offset

    def end(node: ast.expr) -> int:
        return starts[node.end_lineno - 1] + node.end_col_offset

    def between(left: ast.expr, kind: type, right: ast.expr) -> Iterator[Mutant]:
        before, after = _OPERATORS.get(kind, ("", ""))
        place = source.encode().find(before.encode(), end(left), begin(right))
        if before and place >= 0:
            yield Mutant(file, place, place + len(before), after)

    for node in _nodes(ast.parse(source)):
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from between(node.left, type(node.ops[0]), node.comparators[0])
        elif isinstance(node, ast.BinOp):
            yield from between(node.left, type(node.op), node.right)
        elif isinstance(node, ast.BoolOp):
            yield from between(node.values[0], type(node.op), node.values[1])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield Mutant(file, begin(node), begin(node.operand), "")
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            after = not node.value if isinstance(node.value, bool) else node.value + 1
            yield Mutant(file, begin(node), end(node), repr(after))


def draw(root: Path, seed: int, rooms: list[str]) -> list[Mutant]:
    """Return all slips of ``rooms`` in random order."""
    files = [path for room in rooms for path in sorted((root / PACKAGE / room).rglob("*.py"))]
    found = [slip for path in files for slip in slips(str(path.relative_to(root)), path.read_text())]
    random.Random(seed).shuffle(found)
    return found


def copy_of_checkout(folder: Path) -> None:
    """Copy to ``folder`` all that git tracks or does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def failed(tree: Path, room: str) -> str | None:
    """Run the tests of ``room``; return the first that fails, if one does."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--room={room}", "-m", _TIER]
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return lines[0].split(" ", 1)[1].partition(" - ")[0] if lines else "import"


def main() -> None:
    """Draw, try and count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=20, metavar="N", help="how many slips (default %(default)s)")
    parser.add_argument("--seed", type=int, default=27, metavar="SEED", help="of the draw (default %(default)s)")
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS, metavar="ROOM", help=", ".join(ROOMS))
    arguments = parser.parse_args()
    noticed = tried = 0
    passes: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Path(folder)
        copy_of_checkout(tree)
        for mutant in draw(tree, arguments.seed, arguments.rooms)[: arguments.count]:
            room, path = room_of(mutant.file), tree / mutant.file
            if room not in passes:
                passes[room] = failed(tree, room) is None
            if not passes[room]:
                print(f"left out: tests of {room} fail without a slip", flush=True)
                continue
            told, original = mutant.told(tree), path.read_bytes()
            path.write_bytes(mutant.source(tree))
            by = failed(tree, room)
            path.write_bytes(original)
            tried, noticed = tried + 1, noticed + (by is not None)
            print(f"{'noticed ' if by else 'SURVIVED'} {told}  {by or ''}", flush=True)
    print(f"{noticed} of {tried} slips noticed")


if __name__ == "__main__":
    main()
