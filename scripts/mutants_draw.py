"""The slips of ``scripts/mutants.py``: cosmic-ray's changes of one place of the source, drawn by a seed."""

from __future__ import annotations

import ast
import difflib
import functools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cosmic_ray.plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

PACKAGE = "megatron_lossy"
ROOMS = ("recovery", "channel", "transport", "mechanisms", "lab/virtual", "hooks", "delivery_log", "base/coding")
_BITS = {"RShift", "LShift", "BitOr", "BitAnd", "BitXor"}
_SPEAKS = {"print", "warn"}
_DECLARES = {"@abstractmethod", "@overload"}

Position = tuple[int, int]


@dataclass(frozen=True)
class Mutant:
    """One change of one place. ``lines`` are those of the statement around it."""

    number: int
    file: str
    operator: str
    occurrence: int
    place: Position
    lines: range
    in_function: bool

    def source(self, root: Path) -> str:
        """The changed module."""
        operator = cosmic_ray.plugins.get_operator(self.operator)()
        return mutate_code((root / self.file).read_text(), operator, self.occurrence)

    def diff(self, root: Path) -> tuple[str, str]:
        """The lines before and after, without what both have at the side."""
        old, new = (root / self.file).read_text().splitlines(), self.source(root).splitlines()
        changed = [line for line in difflib.ndiff(old, new) if line[:2] in ("- ", "+ ")]
        return tuple(" ".join(line[2:].strip() for line in changed if line[0] == sign) for sign in "-+")


def family(operator: str) -> str:
    """Changes of one place that differ only in what comes instead are of one family."""
    return operator.removeprefix("core/").partition("_")[0]


def _plausible(operator: str) -> bool:
    """Nobody writes ``<<`` for ``+`` or ``is`` for ``<``, and everything notices it."""
    kind, _, change = operator.removeprefix("core/").partition("_")
    old, _, new = change.partition("_")
    if kind == "ReplaceBinaryOperator":
        return (old in _BITS) == (new in _BITS)
    if kind == "ReplaceComparisonOperator":
        return (old in ("Is", "IsNot")) == (new in ("Is", "IsNot"))
    return True


def _left_out(tree: ast.Module) -> Iterator[ast.AST]:
    """Annotations, what only speaks to people, and what Python never runs."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef):
            if node.returns:
                yield node.returns
            if node.name in ("__repr__", "__str__"):
                yield node
        elif isinstance(node, ast.Raise):
            yield node
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _SPEAKS:
                yield node
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield node


def _span(node: ast.AST, text: list[str]) -> tuple[Position, Position]:
    """In characters: ast counts columns in bytes."""
    begin, end = node.lineno, node.end_lineno
    first, last = text[begin - 1].encode()[: node.col_offset], text[end - 1].encode()[: node.end_col_offset]
    return (begin, len(first.decode())), (end, len(last.decode()))


def _statement(tree: ast.Module, line: int) -> tuple[range, bool]:
    """Lines of the innermost statement there, and whether they are within a function.

    Of a compound statement without its body, but of a function's head its body.
    """
    lines, inside, node, body = range(line, line + 1), False, None, tree.body
    while body:
        found = [each for each in body if min([each.lineno, *_decorators(each)]) <= line <= each.end_lineno]
        if not found:
            break
        node = found[0]
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt | ast.ExceptHandler)]
        inner = [child for child in inner if child.lineno > node.lineno]
        end = min((child.lineno for child in inner), default=node.end_lineno + 1)
        if line < end and isinstance(node, ast.FunctionDef):  # its head runs at import, its body when it is called
            return range(end, node.end_lineno + 1), True
        if line < end:
            return range(node.lineno, max(end, node.lineno + 1)), inside
        inside = inside or isinstance(node, ast.FunctionDef)
        lines, body = range(node.lineno, end), inner
    return lines, inside


def _decorators(node: ast.AST) -> list[int]:
    return [decorator.lineno for decorator in getattr(node, "decorator_list", [])]


@functools.cache
def _operators() -> list[tuple[str, Any]]:
    found = [(name, cosmic_ray.plugins.get_operator(name)) for name in sorted(cosmic_ray.plugins.operator_names())]
    return [(n, kind()) for n, kind in found if not kind.arguments() and not n.endswith("NoOp") and _plausible(n)]


def _of(root: Path, path: Path) -> Iterator[tuple[str, str, str, int, Position, range, bool]]:
    source = path.read_text()
    tree, text = ast.parse(source), source.splitlines()
    nodes = [node for node in ast_nodes(get_ast(source)) if node.type not in ("name", "newline", "string", "endmarker")]
    spans = [_span(node, text) for node in _left_out(tree)]
    for name, operator in _operators():
        places = (begin for node in nodes for begin, _ in operator.mutation_positions(node))
        for occurrence, place in enumerate(places):
            declares = text[place[0] - 1].strip() in _DECLARES
            if not declares and not any(begin <= place < end for begin, end in spans):
                lines, inside = _statement(tree, place[0])
                yield str(path.relative_to(root)), family(name), name, occurrence, tuple(place), lines, inside


def draw(root: Path, seed: int, rooms: tuple[str, ...] = ROOMS) -> Iterator[Mutant]:
    """All places in random order, each with one of its changes: what comes first is a fair sample.

    A place counts once for each family, however many operators could stand there instead.
    """
    places: dict[tuple[str, str, Position], list[tuple[str, int, range, bool]]] = {}
    for room in rooms:
        of_room = root / PACKAGE / room
        for path in sorted(of_room.rglob("*.py")) if of_room.is_dir() else [of_room.with_suffix(".py")]:
            for file, kind, name, occurrence, place, lines, inside in _of(root, path):
                places.setdefault((file, kind, place), []).append((name, occurrence, lines, inside))
    order, chance, number = sorted(places), random.Random(seed), 0
    chance.shuffle(order)
    for key in order:
        file, _, place = key
        name, occurrence, lines, inside = chance.choice(places[key])
        mutant = Mutant(number + 1, file, name, occurrence, place, lines, inside)
        changed = mutant.source(root)
        try:
            same = changed is None or ast.dump(ast.parse(changed)) == ast.dump(ast.parse((root / file).read_text()))
        except SyntaxError:
            continue
        if not same:
            number += 1
            yield mutant
