"""``python -m megatron_lossy.launch.agent …``: torchrun with the same arguments, and one line instead of its report.

torchrun raises its report, so that forty lines follow the line with the error, and ends with status 1. This program
ends with the line and the status of the rank that failed first.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

PROGRAM = "megatron_lossy.launch"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``torch.distributed.run`` with ``arguments``."""
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"{PROGRAM}: rank {rank} failed: {_reason(failure)}", file=sys.stderr, flush=True)
        sys.exit(max(1, failure.exitcode))
    except SignalException as error:
        print(f"{PROGRAM}: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)


def _reason(failure: ProcessFailure) -> str:
    """The error that the rank reported, or its end."""
    told = failure.message
    if isinstance(told, dict):
        lines = str(told.get("message", "")).strip().splitlines()
        return lines[-1] if lines else f"status {failure.exitcode}"
    return str(told) if failure.exitcode < 0 else f"status {failure.exitcode}"


if __name__ == "__main__":
    main()
