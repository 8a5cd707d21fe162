"""The program that scripts/same_results.py starts for each checkout: it runs cases there and reports results.

    python same_results_run.py CHECKOUT FOLDER

A case comes as a line of JSON on standard input, and its outcome goes as one to standard output. Torch and
megatron-core are imported once, and every rank of every run is forked from here: fresh state for the price of a fork.
Of the checkout only the command lines are used, so that its insides may change between two checkouts.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from same_results_digest import digest

#: Seconds after which a run is killed.
LIMIT = 600
#: Modules that each rank would import. Nothing of the checkout, and nothing that starts a thread.
PRELOAD = (
    "torch",
    "torch.distributed.checkpoint",
    "megatron.core.distributed",
    "megatron.core.optimizer",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.torch",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "pandas",
    "pyarrow.parquet",
)
_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _forked(work: Callable[[], Any]) -> int:
    """Start a process that does ``work`` and nothing after it; returns its number."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        work()
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _wait(processes: list[int]) -> list[int]:
    """Wait for ``processes``; return their exit statuses. The first that fails ends the others, as a launcher does."""
    waiting, statuses, end = dict(enumerate(processes)), {}, time.monotonic() + LIMIT
    try:
        while waiting:
            for rank, process in list(waiting.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    statuses[rank] = os.waitstatus_to_exitcode(status)
                    del waiting[rank]
                    if statuses[rank]:
                        end = min(end, time.monotonic() + 2)
            if time.monotonic() > end:
                _kill(waiting)
            time.sleep(0.005)
    finally:
        _kill(waiting)
    return [statuses[rank] for rank in sorted(statuses)]


def _kill(waiting: dict[int, int]) -> None:
    for process in waiting.values():
        # With the children that it has.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    values = (rank, rank, ranks, ranks, "127.0.0.1", port)
    return dict(zip(_RANK, map(str, values))) if ranks else {}


def _redirect(name: str, rank: int) -> None:
    for number, suffix in ((1, "out"), (2, "err")):
        handle = os.open(f"{name}.{rank}.{suffix}", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(handle, number)
        os.close(handle)


def _train(arguments: list[str]) -> None:
    from megatron_lossy.lab.train.__main__ import main

    sys.argv = ["megatron_lossy.train", *arguments]
    main(arguments)


def _launch(arguments: list[str]) -> None:
    # A fresh interpreter: the script's own Megatron must be the first that is imported.
    os.execv(sys.executable, [sys.executable, "-m", "megatron_lossy", *arguments])


def _run(arguments: list[str], ranks: int, program: str, name: str) -> list[int]:
    """Run once in the current folder, with output in files of ``name``; return the ranks' exit statuses."""
    port = _free_port()

    def rank_main(rank: int) -> None:
        os.environ.update(_environment(rank, ranks, port))
        _redirect(name, rank)
        warnings.simplefilter("ignore")
        (_launch if program == "launcher" else _train)(arguments)

    return _wait([_forked(lambda rank=rank: rank_main(rank)) for rank in range(max(1, ranks))])


def _output(name: str, ranks: int, suffix: str) -> list[str]:
    files = [Path(f"{name}.{rank}.{suffix}") for rank in range(max(1, ranks))]
    return [file.read_text(errors="replace") for file in files]


def run_case(case: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Run ``case`` in ``folder``; return its outcome."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    os.chdir(folder)
    for name, text in case["files"].items():
        Path(name).write_text(text)
    outcome: dict[str, Any] = {"runs": []}
    for number, arguments in enumerate(case["runs"]):
        name = f"../{folder.name}.{number}"
        for _ in range(3):
            statuses = _run(arguments, case["ranks"], case["program"], name)
            errors = "\n".join(_output(name, case["ranks"], "err"))
            if "EADDRINUSE" not in errors and "address already in use" not in errors:
                break
        output = _output(name, case["ranks"], "out")
        outcome["runs"].append({"statuses": statuses, "output": output, "errors": errors[-4000:]})
        if any(statuses):
            break
    result = folder.with_name(folder.name + ".json")
    # In a process of its own, since torch starts threads when it reads a checkpoint.
    status = _wait([_forked(lambda: result.write_text(json.dumps(digest(Path("."), outcome, case["program"]))))])
    if status != [0]:
        raise RuntimeError("what it left behind cannot be read")
    return json.loads(result.read_text())


def _describe() -> dict[str, str]:
    """Return the facts that decide about the last bit, besides the checkout."""
    import megatron.core
    import numpy
    import torch

    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if "model name" in line), model)
    return {
        "processor": model,
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "megatron-core": megatron.core.__version__,
        "python": platform.python_version(),
    }


def main() -> None:
    """Serve cases until standard input ends."""
    checkout, scratch = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the ranks are ended as well
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    sys.path[0] = str(checkout)  # instead of the folder of this file
    found = importlib.util.find_spec("megatron_lossy")  # without importing it
    if found is None or not Path(found.origin or "").resolve().is_relative_to(checkout):
        sys.exit(f"Python finds no megatron_lossy there but {found and found.origin}")
    for module in PRELOAD:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    # A checkout is only read; what its modules compile to is put aside, once for all ranks.
    gc.freeze()  # or the collector would copy to every rank what is shared with it
    sys.pycache_prefix, sys.dont_write_bytecode = str(scratch / "pycache"), False
    print(json.dumps(_describe()), file=answers)
    for line in sys.stdin:
        case = json.loads(line)
        started = time.monotonic()
        try:
            answer = run_case(case, scratch / case["folder"])
        except Exception as error:
            traceback.print_exc()
            answer = {"absent": f"did not run to an outcome ({error})"}
        answer["seconds"] = time.monotonic() - started
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
