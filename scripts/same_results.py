"""Run the same small trainings from two checkouts of this project and compare everything that comes out.

    python scripts/same_results.py OLD NEW [--quick] [--only PATTERN …] [--megatron-lm PATH] [--record FILE]
    python scripts/same_results.py OLD --record FILE
    python scripts/same_results.py FILE NEW

OLD and NEW are checkouts, or files that --record wrote of one. Compared are, to the last bit: weights and optimizer
state, losses, gradient norms and every other metric, the output, the delivery log, and saved replicas. Times and
versions are not. A setting that only NEW has is no difference. A setting that a checkout lacks is "not there".

The exit status is 0 if all cases are the same, 1 if one differs, 2 if the question makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

from same_results_cases import Case, all_cases
from same_results_compare import Verdict, verdict

FORMAT = 1
RUNNER = Path(__file__).with_name("same_results_run.py")
_SEEN_BY_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_LOCALID")


def _folder(case: Case) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in case.name)


def refuse(text: str) -> NoReturn:
    """Say what is wrong in a line, and leave with status 2."""
    print(f"same_results: error: {text}", file=sys.stderr)
    sys.exit(2)


class Failure(RuntimeError):
    """Nothing can be compared: another machine, or a runner that died."""


class Recording:
    """Return the record that an earlier call made of a checkout."""

    def __init__(self, path: Path, renamed: bool) -> None:
        self._renamed = renamed
        try:
            content = json.loads(path.read_text())
            self.machine: dict[str, str] = content["machine"]
            self._cases: dict[str, Any] = content["cases"]
            known = content["format"] == FORMAT
        except (OSError, ValueError, KeyError, TypeError):
            known = False
        if not known:
            refuse(f"{path}: must be a checkout, or a file that --record wrote")

    def outcome(self, case: Case) -> dict[str, Any]:
        """Return its outcome, or the reason why there is none."""
        there = self._cases.get(case.name)
        if there is None:
            return {"absent": "not recorded"}
        if not self._renamed and there["case"] != json.loads(json.dumps(case.spelled)):
            return {"absent": "recorded with other flags"}
        return there["outcome"]


class Checkout:
    """A checkout, and a process that runs cases from it."""

    def __init__(self, path: Path, scratch: Path, megatron_lm: str | None) -> None:
        self._path, self._scratch, self._megatron_lm = path, scratch, megatron_lm
        write_data(scratch / "data")
        environment = {name: value for name, value in os.environ.items() if name not in _SEEN_BY_RANKS}
        environment |= {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(path), os.environ.get("PYTHONPATH")])),
            "PYTHONHASHSEED": "0",
            "PYTHONDONTWRITEBYTECODE": "1",
            # Sums depend on the number of threads. Every machine has a CPU.
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        }
        self._errors = open(scratch / "runner.err", "w")
        self._process = subprocess.Popen(
            [sys.executable, str(RUNNER), str(path), str(scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
            cwd=scratch,
        )

    def describe(self) -> dict[str, str]:
        """Return the machine and the versions."""
        return self._answer()

    def outcome(self, case: Case) -> dict[str, Any]:
        """Return its outcome, or the reason why there is none."""
        order = {**case.order(self._megatron_lm), "folder": _folder(case)}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def forget(self, case: Case) -> None:
        """Remove what the runs of ``case`` wrote."""
        shutil.rmtree(self._scratch / _folder(case), ignore_errors=True)
        for file in self._scratch.glob(f"{_folder(case)}.*"):
            file.unlink()

    def close(self) -> None:
        """End the process, and the runs that are still going."""
        with contextlib.suppress(OSError):
            self._process.terminate()
        self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            text = (self._scratch / "runner.err").read_text().strip()
            raise Failure(f"{self._path}: {text.splitlines()[-1] if text else 'its runner died'}")
        return json.loads(line)


def write_data(folder: Path) -> None:
    """Write two data sets in Megatron's format and a trace, of arithmetic alone: the same for every checkout."""
    import numpy as np

    folder.mkdir(parents=True)
    state, letters = 1, bytearray()
    while len(letters) < 12000:
        state = state * 6364136223846793005 % 2**64 + 1442695040888963407
        letters += b" aaeeiioouu\nbcdfghlmnrstt.((="[state >> 59 :][: 1 + (state >> 40) % 3]
    for name, text in (("train", letters[:8000]), ("valid", letters[8000:12000])):
        tokens = np.append(np.frombuffer(text, dtype=np.uint8).astype("<u2"), np.uint16(256))
        (folder / f"{name}.bin").write_bytes(tokens.astype("<u2").tobytes())
        parts = [b"MMIDIDX\x00\x00", np.uint64(1), np.uint8(8), np.uint64(1), np.uint64(2)]
        parts += [np.int32([len(tokens)]), np.int64([0]), np.int64([0, 1])]
        (folder / f"{name}.idx").write_bytes(b"".join(p if isinstance(p, bytes) else p.tobytes() for p in parts))
    steps, ranks, units = 6, 2, 1
    number = np.arange(steps * ranks * ranks * units).reshape(steps, ranks, ranks, units)
    np.savez(folder / "trace.npz", grad=number * 7 % 5 > 1, param=number * 11 % 7 > 2)


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """Return the cases that are asked for."""
    cases = all_cases(arguments.megatron_lm is not None)
    patterns = [f"*{pattern}*" for pattern in arguments.only or [""]]
    cases = [case for case in cases if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if arguments.quick:
        cases = [case for case in cases if case.quick]
    if not cases:
        refuse(f"--only {' '.join(arguments.only or ['(all)'])}: no such case; --list names them")
    return cases


class Comparison:
    """The cases of one call, shared by threads that each have a runner for each checkout."""

    def __init__(self, sides: list[Path], cases: list[Case], arguments: argparse.Namespace, scratch: Path) -> None:
        self._sides, self._cases, self._arguments, self._scratch = sides, cases, arguments, scratch
        self._recorded = {side: Recording(side, arguments.renamed) for side in sides if side.is_file()}
        self._queue: queue.SimpleQueue[Case] = queue.SimpleQueue()
        for case in cases:
            self._queue.put(case)
        self._lock = threading.Lock()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self.verdicts: dict[str, Verdict] = {}
        self.machines: dict[int, dict[str, str]] = {}
        self._failure: Exception | None = None
        self._runners: list[Checkout] = []
        for number, side in enumerate(sides):
            if side in self._recorded:
                self._same_machine(number, self._recorded[side].machine)

    def run(self, jobs: int) -> None:
        """Run all cases, printing a line for each."""
        threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(jobs)]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            for runner in self._runners:
                runner.close()
        if self._failure:
            raise self._failure

    def _work(self, number: int) -> None:
        runners: list[Any] = []
        try:
            for k, side in enumerate(self._sides):
                scratch = self._scratch / f"{'new' if k else 'old'}{number}"
                runners.append(self._recorded.get(side) or Checkout(side, scratch, self._arguments.megatron_lm))
                self._runners += [runner for runner in runners[k:] if isinstance(runner, Checkout)]
            for k, runner in enumerate(runners):
                if isinstance(runner, Checkout):
                    self._same_machine(k, runner.describe())
            while self._failure is None:
                self._one(self._queue.get_nowait(), runners)
        except queue.Empty:
            pass
        except Exception as error:
            self._failure = self._failure or error

    def _same_machine(self, number: int, machine: dict[str, str]) -> None:
        with self._lock:
            self.machines[number] = machine
            first = next(iter(self.machines.values()))
            for name, value in machine.items():
                if first.get(name) != value:
                    raise Failure(f"{self._sides[0]}: made with {name} {first.get(name)}, here it is {value}")

    def _one(self, case: Case, runners: list[Any]) -> None:
        started = time.monotonic()
        outcomes = [runner.outcome(case) for runner in runners]
        result = verdict(case.status, *outcomes, renamed=self._arguments.renamed)
        with self._lock:
            self.outcomes[case.name] = outcomes[0]
            self.verdicts[case.name] = result
            place = f"{len(self.verdicts):3d}/{len(self._cases)}"
            print(f"{place}  {case.name:48s} {result.text}  ({time.monotonic() - started:.1f} s)", flush=True)
        for runner in runners:
            if isinstance(runner, Checkout) and self._arguments.keep is None:
                runner.forget(case)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], allow_abbrev=False, usage="same_results.py OLD NEW [options]; see --help"
    )
    parser.error = lambda message: refuse(message.removeprefix("argument "))
    parser.add_argument("sides", nargs="*", metavar="OLD NEW", help="checkouts, or files that --record wrote")
    parser.add_argument("--record", metavar="FILE", help="write the results of OLD, for later comparisons")
    parser.add_argument("--quick", action="store_true", help="a subset that touches everything once")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases whose names contain one of these; * ? []")
    parser.add_argument(
        "--renamed", action="store_true", help="flags have other names in NEW: compares neither settings nor messages"
    )
    parser.add_argument("--list", action="store_true", help="name the cases and leave")
    parser.add_argument("--megatron-lm", metavar="PATH", help="checkout of Megatron-LM: also its pretrain_gpt.py")
    parser.add_argument("--keep", metavar="FOLDER", help="leave what the runs write there")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=max(1, cores // 2), metavar="N", help="cases at a time")
    arguments = parser.parse_args()
    if arguments.megatron_lm is not None:
        path = Path(arguments.megatron_lm).resolve()
        if not (path / "pretrain_gpt.py").is_file():
            refuse(f"--megatron-lm {path}: has no pretrain_gpt.py")
        if not list((path / "megatron/core/datasets").glob("helpers_cpp*.so")):
            refuse(f"--megatron-lm {path}: its megatron/core/datasets must be compiled first, with make")
        arguments.megatron_lm = str(path)
    if arguments.jobs < 1:
        refuse(f"--jobs {arguments.jobs}: must be at least 1")
    return arguments


def _sides(arguments: argparse.Namespace) -> list[Path]:
    sides = [Path(side).expanduser().resolve() for side in arguments.sides]
    if len(sides) != 2 and not (len(sides) == 1 and arguments.record):
        refuse(f"{len(sides)} paths: needs OLD and NEW, or OLD and --record FILE")
    for side in sides:
        if not side.exists():
            refuse(f"{side}: does not exist")
    for side in sides:
        if side.is_dir() and not (side / "megatron_lossy").is_dir():
            refuse(f"{side}: has no megatron_lossy")
    return sides


def main() -> None:
    """Compare, print, record; see the exit statuses above."""
    arguments = _arguments()
    cases = chosen(arguments)
    if arguments.list:
        print("\n".join(f"{case.name}{'  (quick)' if case.quick else ''}" for case in cases))
        return
    sides = _sides(arguments)
    started = time.monotonic()
    if arguments.keep:
        scratch = Path(arguments.keep).resolve()
        if scratch.exists() and any(scratch.iterdir()):
            refuse(f"--keep {scratch}: must be empty")
        scratch.mkdir(parents=True, exist_ok=True)
    else:
        scratch = Path(tempfile.mkdtemp(prefix="same_results."))
    try:
        comparison = Comparison(sides, cases, arguments, scratch)
        comparison.run(min(arguments.jobs, len(cases)))
    except Failure as error:
        refuse(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        if not arguments.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    if arguments.record:
        spelled = {case.name: {"case": case.spelled, "outcome": comparison.outcomes[case.name]} for case in cases}
        content = {"format": FORMAT, "machine": comparison.machines[0], "cases": spelled}
        aside = Path(arguments.record + ".tmp")
        aside.write_text(json.dumps(content))
        os.replace(aside, arguments.record)
    good = _summary(comparison.verdicts)
    print(f"{time.monotonic() - started:.0f} s")
    sys.exit(0 if good else 1)


def _summary(verdicts: dict[str, Verdict]) -> bool:
    counts: dict[str, int] = {}
    for result in verdicts.values():
        counts[result.kind] = counts.get(result.kind, 0) + 1
    bad = {name: result for name, result in verdicts.items() if not result.good}
    if bad:
        print("\nNot the same:")
        for name, result in bad.items():
            print(f"{name}: {result.kind}")
            for line in result.details:
                print(f"    {line}")
    print("\n" + ", ".join(f"{count} {kind}" for kind, count in counts.items()))
    return not bad


def _interrupted(*_: Any) -> NoReturn:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # leave nothing behind, however many signals arrive
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupted)
    main()
