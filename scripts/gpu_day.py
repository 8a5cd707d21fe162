"""Try in eight minutes all that one CUDA device can show, in the order of worth.

    python -m scripts.gpu_day --out FOLDER [--record "one H100"] [--megatron-lm PATH]
    python -m scripts.gpu_day --out FOLDER --second          # a shorter list, for another day
    python -m scripts.gpu_day --out FOLDER --on pretended    # the whole of it without a GPU (docs/impostor.md); or --on cpu

Several ranks share the device, which NCCL allows from 2.31 on. Each step has its share of the time, and what the steps before it
left. It prints one line. After a failure the next one follows. FOLDER gets the output of each step, result.json, and with --record
tests/machines.yaml as it is then. Exit status 0 if no step failed or ran out of time, 1 if one did.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: Packages that the steps import, and that a machine with torch may lack.
PACKAGES = "megatron-core einops numpy psutil pyyaml matplotlib tensorboard pyarrow pytest pytest-timeout hypothesis"
#: NCCL's buffers stay small, as Megatron makes many groups; cuBLAS adds up in one order; nothing is compiled, as in the budget.
ENVIRONMENT = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_BUFFSIZE": "1048576",
    "NCCL_MAX_NCHANNELS": "2",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
#: Which tests run.
MARKERS = {"cuda": "cuda", "pretended": "cuda", "cpu": "on_cuda and not cuda"}


@dataclass
class Step:
    """A command of Python, its share of 480 seconds, and how it ended.

    ``status``: passed, failed, skipped, stopped by its limit, or left for want of time. ``memory``: the most MiB in use of all GPUs,
    where there is nvidia-smi.
    """

    name: str
    share: int
    words: list[str]
    status: str = "left"
    seconds: float = 0.0
    memory: int = 0
    text: str = ""


def steps(options: argparse.Namespace) -> list[Step]:
    """Return the list, in the order of worth."""
    common = ["-m", "pytest", "-q", f"--timeout={7.5 * options.minutes}", "-m", MARKERS[options.on]]
    common += ["--record", options.record] if options.record else []
    common += [f"--megatron-lm={options.megatron_lm}"] if options.megatron_lm else []

    def tests(name: str, share: int, files: str, chosen: str = "") -> Step:
        paths = [f"tests/test_{one}.py" for one in files.split()]
        return Step(name, share, [*common, *paths, *(["-k", chosen] if chosen else [])])

    def program(name: str, share: int, words: str) -> Step:
        return Step(name, share, ["-m", *words.split()])

    calibration = program("calibration", 100, "megatron_lossy doctor --calibrate --json")
    first = [
        tests("ranks share a device", 30, "transport pieces streams", "2-packet or 4-packet or wait or same_bits"),
        *([] if options.on == "cpu" else [calibration]),
        tests("hooks by value", 60, "hooks"),
        tests("FSDP2, HSDP, DDP", 50, "pytorch pytorch_ddp", "without_loss"),
        tests("datagrams", 40, "udp"),
        tests("lead and codes", 35, "compensated compression"),
        tests("logs and kills", 50, "delivery_log train train_failures"),
        tests("islands, sites", 45, "islands_ranks pytorch_islands sites", "not of_two_ranks and not bucket"),
        tests("pretrain_gpt.py", 70, "plugin_megatron_lm"),
    ]
    second = [
        tests("FSDP2 and DDP by value", 60, "pytorch pytorch_ddp", "by_value"),
        tests("islands of two ranks", 60, "islands_ranks", "of_two_ranks"),
        program("time of the hooks", 60, f"benchmarks.step_overhead --ranks 2 --rounds 9 --out {options.out}"),
    ]
    return second if options.second else first


def missing() -> list[str]:
    """Return the missing packages, with their versions in constraints.txt."""
    there = {one.name.lower() for one in importlib.metadata.distributions()}
    wanted = set(PACKAGES.split()) - there
    return [line for line in (ROOT / "constraints.txt").read_text().split() if line.partition("==")[0] in wanted]


def environment(options: argparse.Namespace) -> dict[str, str]:
    """Return the variables of all steps."""
    found = os.environ | ENVIRONMENT
    folders = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    if options.on == "pretended":
        from tests.impostor.device import everywhere

        everywhere(options.out / "pretended")
        folders.insert(1, str(options.out / "pretended"))
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


def run(step: Step, limit: float, options: argparse.Namespace, variables: dict[str, str]) -> None:
    """Run a step; what it started ends with it."""
    if limit < 1:
        return
    log, began = options.out / (re.sub(r"\W+", "_", step.name) + ".log"), time.monotonic()
    mine = f"{os.getpid()} {step.name}"
    step.status = "stopped"
    with log.open("w") as file:
        command, variables = [sys.executable, *step.words], variables | {"GPU_DAY": mine}
        process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=file, stderr=file)
        while step.status == "stopped" and time.monotonic() < began + limit:
            with contextlib.suppress(subprocess.TimeoutExpired):
                step.status = "failed" if process.wait(1) else "passed"
            step.memory = max(step.memory, memory_in_use())
        end_all_with(f"GPU_DAY={mine}")
        process.wait()
    step.seconds, step.text = round(time.monotonic() - began, 1), summary(log.read_text(errors="replace"))
    if step.status == "passed" and "skipped" in step.text and "passed" not in step.text:
        step.status = "skipped"


def memory_in_use() -> int:
    """Return MiB of all GPUs; 0 without nvidia-smi."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError, ValueError):
        return sum(map(int, subprocess.run(command, capture_output=True, text=True).stdout.split()))
    return 0


def end_all_with(variable: str) -> None:
    """Kill all processes with this in their environment: torchrun starts ranks in sessions of their own."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # of another user, or it has ended
            if variable.encode() in file.read_bytes().split(b"\0"):
                os.kill(int(file.parent.name), signal.SIGKILL)


def summary(output: str) -> str:
    """Return the count of passed tests or rows: pytest's last line, the doctor's statuses, or the last line."""
    rows = re.findall(r"^(ok|warning|problem): ", output, re.MULTILINE)
    if rows:
        return ", ".join(f"{rows.count(one)} {one}" for one in dict.fromkeys(rows))
    lines = [line.strip("= ") for line in output.splitlines() if line.strip()] or [""]
    return next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|skipped|error)", line)), lines[-1])


def main() -> int:
    """Run the list; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--on", default="cuda", choices=MARKERS)
    parser.add_argument("--megatron-lm", metavar="PATH", help="a checkout, whose pretrain_gpt.py runs too")
    parser.add_argument("--record", metavar="MACHINE", help="add what passed to tests/machines.yaml")
    parser.add_argument("--second", action="store_true", help="the second list")
    parser.add_argument("--minutes", type=float, default=8.0, help="time for all steps (%(default)s; without a GPU 60)")
    options = parser.parse_args()
    if options.record and options.on != "cuda":
        parser.error("--record: needs --on cuda, as machines.yaml has what ran on a device")
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    if absent := missing():
        print(f"not installed: python -m pip install {' '.join(absent)}", flush=True)
    variables, due, todo = environment(options), time.monotonic(), steps(options)
    for step in todo:
        due += step.share * options.minutes / 8
        run(step, due - time.monotonic(), options, variables)
        print(f"{step.status:8} {step.seconds:6.1f} s  {step.name}: {step.text}", flush=True)
        content = {"on": options.on, "not installed": absent, "steps": [asdict(one) for one in todo]}
        (options.out / "result.json").write_text(json.dumps(content, indent=1))
    if options.record:
        shutil.copy(ROOT / "tests" / "machines.yaml", options.out)
    return 0 if all(one.status in ("passed", "skipped") for one in todo) else 1


if __name__ == "__main__":
    sys.exit(main())
