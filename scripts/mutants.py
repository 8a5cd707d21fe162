"""How many small slips in the core the tests notice (make mutants).

    python scripts/mutants.py [--count 200] [--seed 27] [--jobs 1] [--budget 120] [--again] [--out FOLDER]

cosmic-ray's operators change one place at a time. Places are drawn at random over the rooms of ``mutants_draw.py``, and
each change is made in a copy of this checkout. There the tests run that execute the changed statement, the quickest of
each file first, until one fails. Results are appended to ``mutants.csv``; the same command continues an interrupted run.
``--again`` tries once more what no test noticed, after tests were added. ``equivalents.yaml`` in the same folder names
changes that change nothing, each with the reason; they do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import itertools
import json
import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import yaml
from mutants_draw import ROOMS, Mutant, draw
from mutants_summary import summary
from mutants_tests import Lines, Server, Test, test_files

ROOT = Path(__file__).resolve().parent.parent
FIELDS = (
    *("number", "file", "line", "operator", "before", "after"),
    *("outcome", "by", "tests", "seconds", "again", "again_by"),
)


def copy_of_checkout(folder: Path) -> Path:
    """What git knows or does not ignore, as it is now."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def _first_failure(output: str) -> str:
    for line in output.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            return line.split(" ", 1)[1].partition(" - ")[0]
    return "import"


class Trial:
    """Changes tried in one copy of the checkout. ``trusted``: tests seen to pass there without a change, or not to."""

    def __init__(self, tree: Path, trusted: dict[str, bool]) -> None:
        self._tree, self._trusted = tree, trusted
        self.server = Server(tree)

    def __call__(self, mutant: Mutant, tests: list[Test]) -> tuple[str, str]:
        """``noticed``, ``timeout``, ``survived`` or ``no test``, and the first test that failed."""
        path = self._tree / mutant.file
        original, changed = path.read_text(), mutant.source(self._tree)
        while tests := [test for test in tests if self._trusted.get(test.name, True)]:
            path.write_text(changed)
            try:
                status, output = self._pytest(tests)
            finally:
                path.write_text(original)
            if status is None:
                return "timeout", ""
            if not status:
                return "survived", ""
            by = _first_failure(output)
            if self._trusts([test for test in tests if test.name == by]):
                return "noticed", by
        return "no test", ""

    def _pytest(self, tests: list[Test]) -> tuple[int | None, str]:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as names:
            json.dump([test.name for test in tests], names)
            names.flush()
            slowest, together = max(test.seconds for test in tests), sum(test.seconds for test in tests)
            arguments = ["-x", f"--timeout={max(120, 20 * slowest):.0f}", "--mutants-tests", names.name]
            files = dict.fromkeys(test.file for test in tests)
            status, output = self.server.pytest([*arguments, *files], 300 + 20 * together)
        if status in (4, 5):
            raise RuntimeError(f"these tests cannot be run: {' '.join(files)}\n{output[-2000:]}")
        return status, output

    def _trusts(self, failed: list[Test]) -> bool:
        """Whether a test passes here without the change; what is no test is an import that failed."""
        for test in failed:
            if test.name not in self._trusted:
                self._trusted[test.name] = self._pytest([test])[0] == 0
            return self._trusted[test.name]
        return True


def read_rows(path: Path) -> list[dict[str, str]]:
    """What was tried before."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: list[dict[str, str]]) -> None:
    """All of them; a killed write leaves the old ones."""
    new = path.with_suffix(".new")
    with new.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(rows, key=lambda row: int(row["number"])))
    os.replace(new, path)


def equivalents(folder: Path) -> dict[tuple[str, str, str], str]:
    """Reasons by file, the line before and the line after."""
    path = folder / "equivalents.yaml"
    entries = yaml.safe_load(path.read_text()) if path.exists() else None
    return {(entry["file"], entry["before"], entry["after"]): entry["why"] for entry in entries or []}


def key(row: dict[str, str]) -> tuple[str, str, str]:
    """What names a change whatever moved around it."""
    return row["file"], row["before"], row["after"]


class Run:
    """Mutants that wait, jobs that try them, and rows that are written as they come."""

    def __init__(self, lines: Lines, budget: float, path: Path, rows: list[dict[str, str]], again: bool) -> None:
        self._lines, self._budget, self._path, self._again = lines, budget, path, again
        self._rows = {int(row["number"]): row for row in rows}
        self._lock, self._stopped = threading.Lock(), False
        self._trials: list[Trial] = []
        self._trusted: dict[str, bool] = {}

    def _job(self, waiting: queue.SimpleQueue[Mutant]) -> None:
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            tree = copy_of_checkout(Path(folder))
            trial = Trial(tree, self._trusted)
            self._trials.append(trial)
            with contextlib.suppress(queue.Empty):
                while not self._stopped:
                    self._one(waiting.get_nowait(), trial)
            trial.server.close()

    def _one(self, mutant: Mutant, trial: Trial) -> None:
        begin = time.monotonic()
        tests = self._lines.tests(mutant, self._budget)
        try:
            outcome, by = trial(mutant, tests)
        except RuntimeError:
            if self._stopped:
                return
            raise
        took = f"{time.monotonic() - begin:.0f}"
        with self._lock:
            if self._again:
                self._rows[mutant.number] |= {"again": outcome, "again_by": by}
            else:
                before, after = mutant.diff(ROOT)
                what = (mutant.file, mutant.place[0], mutant.operator.removeprefix("core/"), before, after)
                values = (mutant.number, *what, outcome, by, len(tests), took, "", "")
                self._rows[mutant.number] = dict(zip(FIELDS, map(str, values)))
            write_rows(self._path, list(self._rows.values()))
            place = f"{mutant.file}:{mutant.place[0]}"
            print(f"{mutant.number:4} {outcome:8} {place}  {len(tests)} tests, {took} s  {by}", flush=True)

    def __call__(self, mutants: list[Mutant], jobs: int) -> list[dict[str, str]]:
        waiting: queue.SimpleQueue[Mutant] = queue.SimpleQueue()
        for mutant in mutants:
            waiting.put(mutant)
        threads = [threading.Thread(target=self._job, args=(waiting,)) for _ in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except KeyboardInterrupt:
            self._stopped = True
            for trial in self._trials:
                trial.server.close()
            for thread in threads:
                thread.join()
            sys.exit("mutants: stopped; the same command continues")
        return list(self._rows.values())


def chosen(root: Path, seed: int, count: int, rows: list[dict[str, str]], path: Path) -> Iterator[Mutant]:
    """The first ``count`` of the draw; rows of another draw are refused."""
    done = {int(row["number"]): row for row in rows}
    for mutant in itertools.islice(draw(root, seed), count):
        row = done.get(mutant.number)
        if row and key(row) != (mutant.file, *mutant.diff(root)):
            sys.exit(f"mutants: error: {path} is of other source or another seed: choose another --out")
        yield mutant


def main() -> None:
    """Draw, try and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--count", type=int, default=200, help="how many slips (default %(default)s)")
    parser.add_argument("--seed", type=int, default=27, help="of the draw (default %(default)s)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once (default %(default)s)")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for each (default %(default)s)")
    parser.add_argument("--again", action="store_true", help="try once more what no test noticed")
    parser.add_argument("--note", default="", help="what the page shall say of this run")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks" / "results" / "mutants", help="folder of the results"
    )
    args = parser.parse_args()
    if args.count < 1 or args.jobs < 1 or not math.isfinite(args.budget):
        parser.error("--count and --jobs must be positive, --budget finite")
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "mutants.csv"
    rows = read_rows(path)
    mutants = list(chosen(ROOT, args.seed, args.count, rows, path))
    same = equivalents(args.out)
    slipped = [row for row in rows if row["outcome"] in ("survived", "no test")]
    unnoticed = {int(row["number"]) for row in slipped if key(row) not in same}
    done = {int(row["number"]) for row in rows}
    waiting = [m for m in mutants if (m.number in unnoticed if args.again else m.number not in done)]
    if waiting:
        lines = Lines(ROOT, ROOT / "build" / "mutants")
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
            tree = copy_of_checkout(Path(folder))
            for file in test_files(tree):
                print(f"{file.name}: {lines.measure(tree, file)}", flush=True)
        print(f"{len(waiting)} to try, over {', '.join(ROOMS)}", flush=True)
        rows = Run(lines, args.budget, path, rows, args.again)(waiting, args.jobs)
    (args.out / "mutants.md").write_text(summary(rows, same, args))
    print(f"wrote {args.out / 'mutants.md'}")


if __name__ == "__main__":
    main()
