"""The start of a rank's process, and its end after an error."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from ...base.errors import (
    UsageError,
    a_rank_of_this_node_ended,
    is_unread,
    let_launcher_end,
    machine_error,
    tell_torchrun,
    under_torchrun,
)

#: Seconds that a rank waits after it lost contact, so that torchrun can notice the failed rank.
_NOTICE = 2.0
#: Seconds between ranks of a node. Only the first of them reports.
_BETWEEN = 0.3
_told_to_end = False
#: Signals that stop a run after one iteration, the same on all ranks, with a checkpoint.
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def quiet_imports() -> None:
    """Filter warnings that every rank would repeat: packages megatron-core does without, renamed functions."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def require_megatron() -> None:
    """Import megatron-core. Raise :class:`UsageError` if it is missing, or this program cannot train with its version."""
    from ...base import device

    device.prepare_import()
    from ...hooks import versions

    versions.require_megatron(versions.OLDEST_FOR_TRAIN)


@contextlib.contextmanager
def handling(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Return a context in which ``handler`` takes SIGINT and SIGTERM, which would end the process."""
    previous = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


class OtherRankFailed(RuntimeError):
    """An error for a rank that cannot go on, because another rank failed and reports why."""


def told_to_end() -> None:
    """Note that SIGTERM came. Under torchrun mostly another rank has failed, and errors of this rank follow.

    Another process may have sent it, too; then an error on this rank is a failure of its own.
    """
    global _told_to_end
    _told_to_end = True


@contextlib.contextmanager
def rank_errors(program: str) -> Iterator[None]:
    """End the process with status 1 at once after an error: leaving process groups in order would wait for the others.

    When a rank dies the others lose contact with it, and report that in a line. Errors that :func:`usage_errors`
    reports pass through. Any other error shows its traceback. Under torchrun one rank of a node reports.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or is_unread(error):
            raise
        if failed := machine_error(error):
            raise failed from None
        reason = " ".join(str(error).split())[:200]
        follows = True
        if isinstance(error, OtherRankFailed):
            text = reason
        elif lost_contact(error):
            text = f"lost contact with another rank ({reason})"
        else:
            text, follows = f"an error\n{traceback.format_exc()}", False
        text = f"{program}: rank {os.environ.get('RANK', '0')} stops: {text}"
        if under_torchrun():
            if follows and _told_to_end and a_rank_of_this_node_ended():
                sys.stdout.flush()
                os._exit(0)
            let_launcher_end(_NOTICE * follows + _BETWEEN * int(os.environ.get("LOCAL_RANK", "0")))
        tell_torchrun(text, follows)
        print(text, file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def lost_contact(error: BaseException) -> bool:
    """Return whether ``error`` means that another rank cannot be reached."""
    import torch

    from ...transport.udp import PeerLost

    if isinstance(error, torch.distributed.DistError | PeerLost):
        # Others of NCCL are of this rank: its device's memory is full, say, or another rank has the same device.
        codes = re.findall(r"nccl\w+Error|ncclInvalid\w+", str(error))
        return not codes or bool({"ncclRemoteError", "ncclSystemError"} & set(codes))
    # Gloo's collectives raise plain RuntimeError.
    return isinstance(error, RuntimeError) and "gloo" in str(error)
