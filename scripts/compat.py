"""Run the hook contract over every Megatron that this machine can run, and write the matrix into docs/verified.md.

    python scripts/compat.py [--only NAME …] [--checkout [NAME=]PATH …] [--python PATH …] [--torch VERSION]
                             [--pretrain] [--no-docs]

The contract is tests/test_hooks.py: without loss every bit is Megatron's; with loss reduced shards and stale units are
right by value, with and without overlap, for several optimizer instances. To it belongs what is sent with a lead,
what crosses in pieces, full replicas, and messages between stages, lost by drawing and as datagrams. The wheels of megatron-core are laid side by
side in build/compat/; of a checkout of Megatron-LM the folder megatron/ is put first on the path. Each runs with the
first interpreter that is new enough for it, of the running one and those given; what finds none is skipped, and the
matrix says so. torch is that of the interpreter, and the same Megatron on another torch is another row; --torch takes
only interpreters with that torch, for example 2.6. With --pretrain the checkouts run tests/test_plugin_megatron_lm.py instead: the plugin under the unmodified
pretrain_gpt.py. Rows that do not run stay in the matrix as they are.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import re
import subprocess
import sys
import time
import xml.etree.ElementTree
from dataclasses import dataclass
from pathlib import Path

from megatron_lossy.base.files import write_text

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "compat"
PAGE = ROOT / "docs" / "verified.md"
MARKS = re.compile(r"(<!-- compat -->\n)(.*?)(<!-- end compat -->)", re.DOTALL)

#: Wheels of megatron-core, and the Python that each needs.
WHEELS = {
    "0.12.3": (3, 10),
    "0.13.1": (3, 10),
    "0.14.0": (3, 10),
    "0.15.3": (3, 10),
    "0.16.1": (3, 10),
    "0.17.1": (3, 12),
    "0.18.2": (3, 12),
    "0.19.2": (3, 12),
}

TESTS = (
    "tests/test_hooks.py",
    "tests/test_compensated.py::test_what_is_sent_and_what_owners_keep",
    "tests/test_pieces.py::test_every_setting_of_megatron",
    "tests/test_replicas.py::test_replicas_without_errors_are_megatrons",
    "tests/test_replicas.py::test_replicas_are_equal_after_a_synchronisation",
    "tests/test_pipeline_boundaries.py::test_every_message_loses_what_is_drawn_for_it",
    "tests/test_replicas.py::test_replicas_are_repaired_where_the_optimizer_reads",
)
#: Columns of the matrix, and the tests of each; the last takes the rest.
CONTRACT = {
    "p = 0 identical": r"test_without_loss",
    "with a lead": r"test_what_is_sent",
    "in pieces": r"test_every_setting_of_megatron",
    "full replicas": r"test_replicas",
    "between stages": r"test_every_message|test_stages",
    "optimizer instances": r"two instances",
    "by value": r"",
}
HEADER = ["Megatron", "core", "Python", "torch", *CONTRACT, "pretrain_gpt.py", "not there", "date"]
#: A test, its outcome, and why it was skipped.
Result = tuple[str, str, str]

#: Packages that HabanaAI's branches import and Intel's images bring: module and requirement.
_HABANA = {"pkg_resources": "setuptools<81", "tqdm": "tqdm"}

TORCH = HEADER.index("torch")
PRETRAIN = HEADER.index("pretrain_gpt.py")


@dataclass(frozen=True)
class Megatron:
    """A wheel by its version, or a checkout by its path."""

    name: str
    python: tuple[int, ...]
    checkout: Path | None = None

    def lay(self, python: str) -> Path:
        """Return the folder to put on the path of ``python``: made or found in build/compat."""
        folder = BUILD / "{}-py{}.{}".format(self.name, *_versions_of(python)[0])
        if self.checkout is None:
            if not (folder / "megatron" / "core").is_dir():
                _install(python, folder, f"megatron-core=={self.name}")
        else:
            # Not the checkout itself, whose tests/ and tools/ would hide ours.
            folder.mkdir(parents=True, exist_ok=True)
            link = folder / "megatron"
            link.unlink(missing_ok=True)
            link.symlink_to(self.checkout / "megatron")
        return folder


def _install(python: str, folder: Path, requirement: str, needs: bool = False) -> None:
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    subprocess.run([*pip, requirement, *([] if needs else ["--no-deps"])], check=True)


def _checkout(text: str) -> Megatron:
    name, _, path = text.rpartition("=")
    checkout = Path(path).expanduser().resolve()
    if not (checkout / "megatron" / "core").is_dir():
        sys.exit(f"compat: error: --checkout {path}: has no megatron/core")
    project = checkout / "pyproject.toml"
    found = re.search(r'requires-python\s*=\s*">=(\d+)\.(\d+)', project.read_text() if project.is_file() else "")
    return Megatron(name or checkout.name, tuple(map(int, found.groups())) if found else (3, 10), checkout)


@functools.cache
def _versions_of(python: str) -> tuple[tuple[int, ...], str]:
    """Return the versions of the interpreter and of its torch."""
    code = "import sys, torch, pytest, hypothesis, einops; print(*sys.version_info[:2], torch.__version__)"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["does not run"])[-1]
        sys.exit(f"compat: error: --python {python}: {why}; it needs what the extra dev installs")
    major, minor, torch = done.stdout.split()
    return (int(major), int(minor)), torch


def _is_torch(python: str, wanted: str | None) -> bool:
    """Return whether the torch of ``python`` is ``wanted``, or a later build of its version."""
    return wanted is None or f"{_public(_versions_of(python)[1])}.".startswith(f"{wanted}.")


def _public(version: str) -> str:
    """Return ``version`` without the device that it was built for."""
    return version.partition("+")[0]


def _environment(python: str, megatron: Megatron) -> dict[str, str]:
    path = [str(ROOT), str(megatron.lay(python))]
    for module, requirement in _HABANA.items() if megatron.checkout and _is_habana(megatron.checkout) else ():
        if not _has(python, module):
            folder = BUILD / "habana"
            if not (folder / module).is_dir():
                _install(python, folder, requirement)
            path.append(str(folder))
    path += filter(None, [os.environ.get("PYTHONPATH")])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}


def _is_habana(checkout: Path) -> bool:
    return (checkout / "megatron/core/extensions/intel_transformer_engine.py").is_file()


def _has(python: str, module: str) -> bool:
    return not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode


def _identify(python: str, environment: dict[str, str]) -> dict[str, str]:
    """Return versions, from the interpreter that will run the tests."""
    code = (
        "import json, platform, torch; from megatron_lossy.base import device; device.prepare_import(); "
        "import megatron.core as core; print(json.dumps({'core': core.__version__, 'file': core.__file__, "
        "'python': platform.python_version(), 'torch': torch.__version__}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["cannot be imported"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def _pytest(python: str, environment: dict[str, str], megatron: Megatron, *arguments: str) -> list[Result]:
    """Run pytest."""
    report = BUILD / f"{megatron.name}.{Path(arguments[0]).stem}.xml"
    report.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", f"--junitxml={report}"]
    subprocess.run([python, "-m", "pytest", *options, *arguments], env=environment, cwd=ROOT)
    if not report.is_file():
        raise RuntimeError("pytest wrote no report")
    result = []
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped")
        why = skipped.get("message", "") if skipped is not None else ""
        outcome = "failed" if failed else "skipped" if skipped is not None else "passed"
        result.append((case.get("name", ""), outcome, why))
    return result


def _cell(outcomes: list[str]) -> str:
    ran = [outcome for outcome in outcomes if outcome != "skipped"]
    failed = ran.count("failed")
    if not ran:
        return "none ran"
    return f"**{failed} of {len(ran)} fail**" if failed else f"yes ({len(ran)})"


def _columns(results: list[Result]) -> list[str]:
    """Return the cells of the contract."""
    cells = []
    for pattern in CONTRACT.values():
        cells.append(_cell([outcome for name, outcome, _ in results if re.search(pattern, name)]))
        results = [result for result in results if not re.search(pattern, result[0])]
    return cells


def run(megatron: Megatron, pythons: list[str], pretrain: bool) -> tuple[list[str], bool]:
    """Run one Megatron; return its row, and whether nothing failed."""
    today = datetime.date.today().isoformat()
    python = next((python for python in pythons if _versions_of(python)[0] >= megatron.python), None)
    if python is None:
        why = "skipped: needs Python {}.{} (--python)".format(*megatron.python)
        return [megatron.name, "", "", "", *([""] * len(CONTRACT)), "", why, today], True
    started = time.monotonic()
    try:
        environment = _environment(python, megatron)
        versions = _identify(python, environment)
        if not versions["file"].startswith(str(megatron.lay(python))):
            raise RuntimeError(f"Python found another megatron.core: {versions['file']}")
        if pretrain:
            option = f"--megatron-lm={megatron.checkout}"
            results = _pytest(python, environment, megatron, "tests/test_plugin_megatron_lm.py", option)
        else:
            results = _pytest(python, environment, megatron, *TESTS)
    except (RuntimeError, subprocess.CalledProcessError) as error:
        torch = _versions_of(python)[1]
        return [megatron.name, "", "", torch, *([""] * len(CONTRACT)), "", f"**{error}**", today], False
    lacks = re.compile(rf"^(megatron-core {re.escape(versions['core'])}|torch {re.escape(versions['torch'])}) has no ")
    absent = sorted({lacks.sub("", why) for _, outcome, why in results if outcome == "skipped"})
    row = [megatron.name, _public(versions["core"]), versions["python"], versions["torch"]]
    if pretrain:
        row += [*([""] * len(CONTRACT)), _cell([outcome for _, outcome, _ in results]), "", today]
    else:
        row += [*_columns(results), "", "; ".join(absent), today]
    print(f"compat: {' | '.join(row)} ({time.monotonic() - started:.0f} s)", flush=True)
    return row, all(outcome != "failed" for _, outcome, _ in results)


def _table(rows: list[list[str]], header: list[str] = HEADER) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def _key(row: list[str]) -> tuple[str, str]:
    """Return the key of a row: Megatron and torch."""
    return row[0], _public(row[TORCH])


def _written(text: str) -> dict[tuple[str, str], list[str]]:
    """Return the rows between the marks of a page, by :func:`_key`."""
    return {_key(row): row for row in _rows(MARKS, text) if len(row) == len(HEADER)}


def _rows(marks: re.Pattern[str], text: str) -> list[list[str]]:
    found = marks.search(text)
    lines = found[2].splitlines()[2:] if found else []
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines if line.startswith("|")]


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", _public(version))]


def _both(old: str, new: str) -> str:
    return "; ".join(sorted({reason for part in (old, new) for reason in part.split("; ") if reason}))


def merged(text: str, rows: list[list[str]]) -> str:
    """Return ``text`` with ``rows`` in place of those of the same key. A row that did not run replaces nothing."""
    kept = _written(text)
    for row in rows:
        old = kept.get(_key(row))
        if row[-2].startswith("skipped"):
            if not any(name == row[0] for name, _ in kept):
                kept[_key(row)] = row
        elif old is None or not row[1]:
            kept[_key(row)] = row
            kept.pop((row[0], ""), None)  # no longer skipped
        else:
            contract = [here or there for here, there in zip(row[4:PRETRAIN], old[4:PRETRAIN], strict=True)]
            absent = row[-2] if all(row[4:PRETRAIN]) else _both(old[-2], row[-2])
            kept[_key(row)] = [*row[:4], *contract, row[PRETRAIN] or old[PRETRAIN], absent, row[-1]]
    order = {name: number for number, name in enumerate(WHEELS)}
    ordered = sorted(kept.values(), key=lambda row: (order.get(row[0], len(order)), row[0], _numbers(row[TORCH])))
    return MARKS.sub(lambda match: match[1] + _table(ordered) + match[3], text)


def main() -> None:
    """Run, print the matrix, write it; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = {"nargs": "+", "action": "extend"}
    parser.add_argument("--only", **several, metavar="NAME", help="these wheels and no others; 'none' for none")
    parser.add_argument("--checkout", **several, default=[], metavar="[NAME=]PATH", help="checkouts of Megatron-LM")
    parser.add_argument("--python", **several, default=[], metavar="PATH", help="further interpreters, as python3.12")
    parser.add_argument("--torch", metavar="VERSION", help="of the interpreters only those with this torch")
    parser.add_argument("--pretrain", action="store_true", help="run pretrain_gpt.py of the checkouts instead")
    parser.add_argument("--no-docs", action="store_true", help="print the matrix, do not write it")
    arguments = parser.parse_args()
    wanted = list(WHEELS) if arguments.only is None else [name for name in arguments.only if name != "none"]
    for name in wanted:
        if name not in WHEELS:
            parser.error(f"--only {name}: choose from {', '.join(WHEELS)}, none")
    if arguments.pretrain:
        wanted = []
    megatrons = [Megatron(name, WHEELS[name]) for name in wanted] + [_checkout(text) for text in arguments.checkout]
    pythons = [sys.executable, *arguments.python]
    pythons = [python for python in pythons if _is_torch(python, arguments.torch)]
    if not pythons:
        parser.error(f"--torch {arguments.torch}: no interpreter has it; give one with --python")
    BUILD.mkdir(parents=True, exist_ok=True)
    rows, good = [], True
    for megatron in megatrons:
        row, passed = run(megatron, pythons, arguments.pretrain)
        rows.append(row)
        good &= passed
        if not arguments.no_docs:
            write_text(PAGE, merged(PAGE.read_text(encoding="utf-8"), [row]))
    print(_table(rows), end="")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
