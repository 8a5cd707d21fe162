"""Which tests run which line, for ``scripts/mutants.py``: measured once with coverage, and again where a test changed."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from mutants_draw import PACKAGE, ROOMS, Mutant

_COVERAGE = """[run]
source_pkgs = {package}
parallel = true
data_file = {folder}/.coverage
patch = subprocess, fork, _exit
core = ctrace
"""


#: Of other things, and slow: they only need a room to be there.
_OF_OTHERS = {
    "benchmarks",
    "device",
    "doctor",
    "ledger",
    "lstm_language_model",
    "package",
    "patches_folder",
    "udp_fuzz",
}
PYTEST = ["-q", "-p", "mutants_pytest", "-p", "no:cacheprovider"]


@dataclass(frozen=True)
class Test:
    """A test, and its time on the machine that measured it."""

    name: str
    seconds: float

    @property
    def file(self) -> str:
        """Its file."""
        return self.name.partition("::")[0]


def _imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return names


def test_files(root: Path) -> list[Path]:
    """Those that import one of the rooms, themselves or through a helper in ``tests``."""

    def reached(path: Path, seen: set[Path]) -> set[str]:
        names = set() if path in seen else _imports(path)
        seen.add(path)
        for name in list(names):
            helper = root / "tests" / f"{name.split('.')[1]}.py" if name.startswith("tests.") else None
            if helper is not None and helper.exists():
                names |= reached(helper, seen)
        return names

    rooms = tuple(f"{PACKAGE}.{room.replace('/', '.')}" for room in ROOMS)
    return [
        path
        for path in sorted((root / "tests").glob("test_*.py"))
        if path.stem.removeprefix("test_") not in _OF_OTHERS
        and any(f"{name}.".startswith(tuple(f"{room}." for room in rooms)) for name in reached(path, set()))
    ]


def _environment(root: Path) -> dict[str, str]:
    """Imports come from ``root``, those of programs that a test starts as well."""
    paths = [str(root), str(Path(__file__).parent)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


class Server:
    """Runs pytest in ``root`` without importing torch and Megatron each time (``mutants_server.py``)."""

    def __init__(self, root: Path) -> None:
        self._output = tempfile.NamedTemporaryFile("r")
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mutants_server.py"))],
            cwd=root, env=_environment(root), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip

    def pytest(self, arguments: list[str], limit: float) -> tuple[int | None, str]:
        """Status and output; no status after ``limit`` seconds."""
        request = {"arguments": [*PYTEST, *arguments], "output": self._output.name, "limit": limit}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError("the process that runs pytest has ended")
        return json.loads(answer), Path(self._output.name).read_text(errors="replace")

    def close(self) -> None:
        """End it. What it runs just now ends by itself."""
        self._process.kill()
        self._process.wait()
        self._output.close()


class Lines:
    """What each test ran, in ``folder``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        shared = hashlib.sha256()
        helpers = [path for path in (root / "tests").glob("*.py") if not path.name.startswith("test_")]
        for path in sorted([*(root / PACKAGE).rglob("*.py"), *helpers]):
            shared.update(path.read_bytes())
        self._shared = shared.digest()
        self._measured: dict[str, dict] = {}

    def path(self, file: Path) -> Path:
        """Where the lines of a file of tests are."""
        key = hashlib.sha256(self._shared + file.read_bytes()).hexdigest()[:12]
        return self._folder / f"{file.stem}-{key}.json"

    def measure(self, root: Path, file: Path) -> str:
        """Run a file of tests in ``root``, unless that was done; returns what pytest says of it."""
        path = self.path(file)
        said = "measured before"
        if not path.exists():
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:  # a fork server may still write
                settings, lines = Path(folder, "settings"), Path(folder, "lines")
                settings.write_text(_COVERAGE.format(package=PACKAGE, folder=folder))
                command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}", "-m", "pytest", *PYTEST]
                command += ["--mutants-lines", str(lines), str(file.relative_to(root))]
                ended = subprocess.run(command, cwd=root, env=_environment(root), capture_output=True, text=True)
                if not lines.exists():
                    sys.exit(f"mutants: error: {file.name} cannot be measured:\n{ended.stdout[-2000:]}")
                said = ended.stdout.strip().splitlines()[-1]
                path.write_text(lines.read_text())
        self._measured |= json.loads(path.read_text())
        return said

    def tests(self, mutant: Mutant, budget: float) -> list[Test]:
        """Tests that run the statement, of about ``budget`` seconds: of each file the quickest, then of each the next."""
        chosen: dict[str, list[Test]] = {}
        for name, found in self._measured.items():
            run = found["lines"].get(mutant.file)
            if not found["passed"] or not run:
                continue
            # What stands outside of functions runs at import, in whichever test comes first.
            if not mutant.in_function or any(line in mutant.lines for line in run):
                test = Test(name, found["seconds"])
                chosen.setdefault(test.file, []).append(test)
        ranked = [
            (number, test.seconds, test)
            for tests in chosen.values()
            for number, test in enumerate(sorted(tests, key=lambda test: test.seconds))
        ]
        result, spent = [], 0.0
        for _, seconds, test in sorted(ranked, key=lambda entry: entry[:2]):
            if not result or spent + seconds <= budget:
                result.append(test)
                spent += seconds
        return result
