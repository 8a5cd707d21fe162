"""A lossy step on two processes: our trainer, for a few iterations of a model of a few thousand weights."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..environment import without_ranks
from ..launch.options import ENVIRONMENT
from ..train.metrics import METRICS_FILE
from .found import Finding

_SECONDS = 300
_ITERATIONS = 3
_FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    f"--global-batch-size 8 --train-iters {_ITERATIONS} --lr 1e-2 --eval-iters 0 --log-interval 1 "
    "--p-grad 0.5 --p-param 0.5 --loss-unit packet --packet-bytes 256 --distributed-timeout-minutes 2"
).split()
_BACKENDS = {"cpu": "gloo", "cuda": "nccl", "hpu": "hccl"}


def try_step(kind: str, checkout: str | None) -> Finding:
    """Train on two ranks of ``kind``. ``checkout``: a Megatron-LM, to take megatron.core from."""
    name = f"{_BACKENDS[kind]}, {kind}"
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            loss, lost = _train(kind, checkout, folder)
        except (RuntimeError, OSError) as error:
            return Finding("step", name, "problem", f"failed: {error}")
    if not math.isfinite(loss) or not lost > 0:
        return Finding("step", name, "problem", f"wrong: loss {loss:.3f}, {100 * lost:.0f} % of packets lost")
    text = f"{_ITERATIONS} iterations on 2 processes, {100 * lost:.0f} % of packets lost, loss {loss:.3f}"
    return Finding("step", name, "ok", f"{text}, {time.monotonic() - started:.0f} s")


def _train(kind: str, checkout: str | None, folder: str) -> tuple[float, float]:
    """Return the last training loss, and the share of lost gradient packets."""
    from ..data import build_tokenizer, write_indexed

    text, data = (Path(__file__).parents[2] / "config" / "lossy_config.py").read_bytes(), os.path.join(folder, "data")
    write_indexed([("lossy_config.py", text)], data, build_tokenizer("byte"))
    arguments = ["megatron_lossy.train", *_FLAGS, "--data-path", data, "--metrics-dir", os.path.join(folder, "run")]
    more = {"CUDA_VISIBLE_DEVICES": "", "HABANA_VISIBLE_MODULES": ""} if kind == "cpu" else {}
    path = [str(Path(checkout).resolve())] if checkout else []
    done = torchrun(2, arguments, path, more | ENVIRONMENT.get(kind, {}), folder)
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        ours = next((line[:300] for line in lines if "megatron_lossy.train: error: " in line), None)
        raise RuntimeError(ours or error_of_a_rank(done.stderr) or (lines or ["no output"])[0][:300])
    lines = Path(folder, "run", METRICS_FILE).read_text().splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "train"][-1]
    return last["lm loss"], last.get("loss rate grad", 0.0)


def torchrun(
    ranks: int, arguments: Sequence[str], path: Sequence[str], more: Mapping[str, str], folder: str
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m`` ``arguments`` on ``ranks`` ranks, a world of their own wherever this process was started.

    ``path``: folders to import from first. ``more``: environment variables. Raise ``RuntimeError`` if there is no end.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    environment = {**without_ranks(), "OMP_NUM_THREADS": "1", **more}
    known = [*path, str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(known).rstrip(os.pathsep)
    command += ["-m", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {_SECONDS} s") from None


def error_of_a_rank(output: str) -> str | None:
    """Return the first exception in the output of ranks and torchrun, but torchrun's own, which only names a rank."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in output.splitlines()]
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    if (first := next((line for line in errors if "ChildFailedError" not in line), None)) is None:
        return None
    # NCCL says last what a device has failed at.
    last = [after for line, after in itertools.pairwise(lines) if line == "Last error:" and "NCCL" in first]
    return "; ".join([first[:300], *last[:1]])
