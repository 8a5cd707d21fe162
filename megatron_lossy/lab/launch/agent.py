"""``python -m megatron_lossy.lab.launch.agent …``: torchrun with the same arguments, and one line instead of its report.

torchrun raises its report, so that forty lines follow the line with the error, and ends with status 1. This program
ends with the line and the status of the rank that failed first. After SIGTERM it ends with status 0 or :data:`.STOPPED` if all ranks
did, so that a supervisor can find a run that has saved; torchrun itself ends with status 1 and a traceback.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from ...base.errors import STOPPED
from ...base.ledger import Ledger, Patch

PROGRAM = "megatron_lossy.launch"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``torch.distributed.run`` with ``arguments``."""
    statuses: list[int | None] = []
    Ledger("torchrun's agent").install([_noting_ends(statuses)])
    try:
        run.run(run.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"{PROGRAM}: rank {rank} failed: {_reason(failure)}", file=sys.stderr, flush=True)
        sys.exit(max(1, failure.exitcode))
    except SignalException as error:
        if error.sigval == signal.SIGTERM and set(statuses) in ({0}, {STOPPED}):
            print(f"{PROGRAM}: all ranks ended well on SIGTERM", file=sys.stderr, flush=True)
            sys.exit(statuses[0])
        print(f"{PROGRAM}: ended by {error.sigval.name}", file=sys.stderr, flush=True)
        signal.signal(error.sigval, signal.SIG_DFL)
        os.kill(os.getpid(), error.sigval)


def _noting_ends(statuses: list[int | None]) -> Patch:
    """Note the exit statuses of ranks once torchrun has ended them: its exception does not have them."""

    def close(original: Callable[..., None], context: Any, *args: Any, **kwargs: Any) -> None:
        original(context, *args, **kwargs)
        statuses[:] = [handler.proc.poll() for handler in context.subprocess_handlers.values()]

    return Patch(
        target="torch.distributed.elastic.multiprocessing.api:SubprocessContext._close",
        around=close,
        why="torchrun's exception for a signal has no statuses of ranks",
        optional=True,
    )


def _reason(failure: ProcessFailure) -> str:
    """Return the error that the rank reported, or its end."""
    if isinstance(told := failure.message, dict):
        lines = str(told.get("message", "")).strip().splitlines()
        return lines[-1] if lines else f"status {failure.exitcode}"
    return str(told) if failure.exitcode < 0 else f"status {failure.exitcode}"


if __name__ == "__main__":
    main()
