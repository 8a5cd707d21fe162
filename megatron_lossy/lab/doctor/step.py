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
            _write_data(folder)
            loss, lost = _train(kind, checkout, folder)
        except (RuntimeError, OSError) as error:
            return Finding("step", name, "problem", f"failed: {error}")
    if not math.isfinite(loss) or not lost > 0:
        return Finding("step", name, "problem", f"wrong: loss {loss:.3f}, {100 * lost:.0f} % of packets lost")
    text = f"{_ITERATIONS} iterations on 2 processes, {100 * lost:.0f} % of packets lost, loss {loss:.3f}"
    return Finding("step", name, "ok", f"{text}, {time.monotonic() - started:.0f} s")


def _write_data(folder: str) -> None:
    from ..data import build_tokenizer, write_indexed

    text = (Path(__file__).parents[2] / "config" / "lossy_config.py").read_bytes()
    write_indexed([("lossy_config.py", text)], os.path.join(folder, "data"), build_tokenizer("byte"))


def _train(kind: str, checkout: str | None, folder: str) -> tuple[float, float]:
    """Return the last training loss, and the share of lost gradient packets. Raise ``RuntimeError`` if it fails.

    The two ranks are a world of their own, wherever this process was started.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "megatron_lossy.train", *_FLAGS, "--data-path", os.path.join(folder, "data")]
    command += ["--metrics-dir", os.path.join(folder, "run")]
    environment = {**without_ranks(), "OMP_NUM_THREADS": "1", **ENVIRONMENT.get(kind, {})}
    if kind == "cpu":
        environment |= {"CUDA_VISIBLE_DEVICES": "", "HABANA_VISIBLE_MODULES": ""}
    path = [str(Path(checkout).resolve())] if checkout else []
    path += [str(Path(__file__).parents[3]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path).rstrip(os.pathsep)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no end after {_SECONDS} s") from None
    if done.returncode:
        raise RuntimeError(_reason(done.stderr))
    lines = Path(folder, "run", METRICS_FILE).read_text().splitlines()
    last = [record for record in map(json.loads, lines) if record["kind"] == "train"][-1]
    return last["lm loss"], last.get("loss rate grad", 0.0)


def _reason(output: str) -> str:
    """Return the most useful line of a failed launch: ours, else an exception's, else the first."""
    lines = [re.sub(r"^\[rank\d+\]: ?", "", line).strip() for line in output.splitlines()]
    lines = list(filter(None, lines))
    ours = [line for line in lines if "megatron_lossy.train: error: " in line]
    # An exception of torchrun itself only names a rank.
    errors = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Refused"))]
    errors = [line for line in errors if "ChildFailedError" not in line]
    first = [*ours, *errors, *lines, "no output"][0]
    # NCCL prints last which call of a device has failed.
    last = [after for line, after in itertools.pairwise(lines) if line == "Last error:" and "NCCL" in first]
    return "; ".join([first[:300], *last[:1]])
