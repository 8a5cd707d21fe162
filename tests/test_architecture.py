"""Imports run one way: no circles between modules, and no arrow against the order of the rooms.

Read from the source, those inside of functions and for type checkers as well. The allowed imports:
"""

import ast
import functools
from pathlib import Path

import pytest

pytestmark = pytest.mark.shows("imports run one way; pure rooms import no process group", device=False)

PACKAGE = Path(__file__).parents[1] / "megatron_lossy"

#: Rooms from the bottom up; a room is a folder, or a module or folder in it that has a place of its own. Each may import
#: what is in lines before its own, and nothing of its own line.
ORDER = """
base.errors
base.files base.ledger base.fingerprint base.fetch base.checkpoints base.native base.flags
base.jobs
base.section
base.registry
config
config.settings
config.loss_flags
base.device base.exchange base.theory
channel base.coding recovery
run.monitor
delivery_log
transport
run.mechanism
config.refusals
run
hooks pytorch
plugin
mechanisms
lab
__main__
""".strip().splitlines()
LEVEL = {room: number for number, line in enumerate(ORDER) for room in line.split()}


@functools.cache
def modules():
    """Every module by its name below the package."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@functools.cache
def imports():
    """(module, module that it imports) of the package; ``from . import name`` is the module of that name, if any."""
    result, known = set(), modules()
    for module, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name.split(".") for alias in node.names]
                result |= {(module, ".".join(name[1:])) for name in names if name[0] == PACKAGE.name}
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.level:
                base = module.split(".") if module else []
                base = base if path.name == "__init__.py" else base[:-1]
                base = base[: len(base) - node.level + 1]
            elif (node.module or "").split(".")[0] == PACKAGE.name:
                base, node.module = [], node.module.partition(".")[2] or None
            else:
                continue
            source = [*base, *(node.module or "").split(".")] if node.module else base
            for alias in node.names:
                name = ".".join([*source, alias.name])
                result.add((module, name if name in known else ".".join(source)))
    return {(a, b) for a, b in result if a != b and b}  # the package itself holds the version alone


def room_of(module):
    parts = module.split(".")
    prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((prefix for prefix in prefixes if prefix in LEVEL), parts[0])


def test_every_room_has_its_place():
    rooms = {room_of(module) for module in modules() if module} - {"base"}  # that holds rooms alone
    assert rooms == set(LEVEL), rooms ^ set(LEVEL)


def test_no_import_runs_against_the_order():
    wrong = [
        f"{a} imports {b}, which is not below it"
        for a, b in sorted(imports())
        if room_of(a) != room_of(b) and LEVEL[room_of(b)] >= LEVEL[room_of(a)]
    ]
    assert not wrong, "\n".join(wrong)


def mechanism_of(module):
    """The mechanism that ``module`` belongs to; ``None`` for the core."""
    room, _, inside = module.partition(".")
    return inside.split(".")[0] if room == "mechanisms" else None


def test_no_mechanism_imports_another():
    """That nothing below them imports one, and nothing but a command the lab, is the order."""
    found = [
        f"{a} imports {b}"
        for a, b in sorted(imports())
        if mechanism_of(a) and mechanism_of(b) and mechanism_of(a) != mechanism_of(b)
    ]
    assert not found, "\n".join(found)


def test_no_circle_between_modules():
    known = modules()
    following = {module: set() for module in known}
    for a, b in imports():
        following[a].add(b)
    left = dict(following)
    while True:  # take away what imports nothing that is left
        free = [module for module, needs in left.items() if not needs & left.keys()]
        if not free:
            break
        for module in free:
            del left[module]
    in_circles = {module: sorted(needs & left.keys()) for module, needs in left.items()}
    assert not left, f"modules in circles, or above one: {in_circles}"


def test_pure_rooms_know_no_process_group():
    """``channel``, ``recovery``, ``base.exchange`` and ``base.theory`` neither communicate nor import Megatron."""
    for module, path in modules().items():
        if room_of(module) in ("channel", "recovery", "base.exchange", "base.theory"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom) and not node.level:
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                if isinstance(node, ast.Attribute):
                    names = [ast.unparse(node)]
                for name in names:
                    foreign = name.startswith("torch.distributed") or name.split(".")[0] == "megatron"
                    assert not foreign, f"{module} uses {name}"


#: Verbs of mechanisms that one class alone may override.
LONE_VERBS = 5


def names_in(body):
    """The names of methods and attributes in the ``body`` of a class."""
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {node.name for node in body if isinstance(node, ast.FunctionDef)} | set(map(ast.unparse, targets))


def test_few_verbs_have_one_implementer():
    """A verb of one mechanism is a subscription to an event of a run, or an object in a slot of it."""
    trees = [ast.parse(path.read_text()) for path in modules().values()]
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]

    def first_with(verb, base):
        """The classes below ``base`` that have ``verb`` while none between has."""
        below = [node for node in classes if base in map(ast.unparse, node.bases)]
        have = [node for node in below if verb in names_in(node.body)]
        return have + [found for node in below if node not in have for found in first_with(verb, node.name)]

    count = {
        f"{base.name}.{verb}": len(first_with(verb, base.name))
        for base in classes
        if base.name in ("Mechanism", "Part", "Flags") and not base.bases
        for verb in names_in(base.body)
        if verb[0] != "_"
    }
    assert count["Mechanism.table"] >= 6 and count["Part.attach"] >= 5
    alone = [verb for verb, found in count.items() if found == 1]
    assert len(alone) <= LONE_VERBS, alone
