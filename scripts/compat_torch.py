"""Run the tests of FSDP2 and DDP over versions of torch, and write the matrix into docs/verified.md.

    python -m scripts.compat_torch [--torch VERSION …] [--no-docs]

Each version is laid in build/compat/ (``pip install --target``, with all that it needs) and put first on the path of the
running interpreter. Without ``--torch`` it is the interpreter's own. Rows that do not run stay as they are.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from megatron_lossy.base.files import write_text
from scripts.compat import BUILD, PAGE, ROOT, Megatron, _cell, _install, _numbers, _pytest, _rows, _table

MARKS = re.compile(r"(<!-- compat-torch -->\n)(.*?)(<!-- end compat-torch -->)", re.DOTALL)
#: Columns, and the file and the names of the tests of each.
COLUMNS = {
    "FSDP2, p = 0 identical": ("test_pytorch", r"without_loss"),
    "FSDP2 by value": ("test_pytorch", ""),
    "log, state, transports": ("test_pytorch_run", ""),
    "DDP": ("test_pytorch_ddp", ""),
}
HEADER = ["torch", "Python", *COLUMNS, "date"]


def lay(version: str) -> Path:
    """Return the folder of torch ``version``: made or found in build/compat."""
    folder = BUILD / f"torch-{version}"
    if not (folder / "torch").is_dir():
        _install(sys.executable, folder, f"torch=={version}", needs=True)
    return folder


def run(version: str | None) -> tuple[list[str], bool]:
    """Run one torch; return its row, and whether nothing failed."""
    path = [str(lay(version))] if version else []
    path += [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    code = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    found = subprocess.run(code, capture_output=True, text=True, env=environment, check=True).stdout.strip()
    results = {}
    for file in dict.fromkeys(file for file, _ in COLUMNS.values()):
        results[file] = _pytest(
            sys.executable, environment, Megatron(f"torch-{found}", (3, 10)), f"tests/{file}.py", "-m", "not slurm"
        )
    cells = []
    for file, pattern in COLUMNS.values():
        own = [result for result in results[file] if re.search(pattern, result[0])]
        results[file] = [result for result in results[file] if result not in own]
        cells.append(_cell([outcome for _, outcome, _ in own]))
    return [found, platform.python_version(), *cells, datetime.date.today().isoformat()], "fail" not in "".join(cells)


def merged(text: str, row: list[str]) -> str:
    """Return ``text`` with ``row`` in the place of that of the same torch."""
    rows = sorted([*(old for old in _rows(MARKS, text) if old[0] != row[0]), row], key=lambda row: _numbers(row[0]))
    return MARKS.sub(lambda match: match[1] + _table(rows, HEADER) + match[3], text)


def main() -> None:
    """Run, print and write the rows; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=[None], metavar="VERSION", help="lay these and run them")
    parser.add_argument("--no-docs", action="store_true", help="print the rows, do not write them")
    arguments = parser.parse_args()
    BUILD.mkdir(parents=True, exist_ok=True)
    good = True
    for version in arguments.torch:
        row, passed = run(version)
        print("compat_torch: " + " | ".join(row), flush=True)
        good &= passed
        if not arguments.no_docs:
            write_text(PAGE, merged(PAGE.read_text(encoding="utf-8"), row))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
