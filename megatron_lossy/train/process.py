"""How a rank's process starts, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator

from ..errors import (
    UsageError,
    a_rank_of_this_node_ended,
    is_unread,
    let_launcher_end,
    machine_error,
    tell_torchrun,
    under_torchrun,
)

#: Seconds by which a rank that lost contact leaves torchrun time to notice who failed.
_NOTICE = 2.0
#: And seconds between ranks of a node, of which the first to speak is the only one.
_BETWEEN = 0.3
_told_to_end = False


def launched_ranks() -> int:
    """Ranks of the world that torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def quiet_imports() -> None:
    """Keep out of the log what every rank would repeat: packages megatron-core does without, renamed functions."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")


def require_megatron() -> None:
    """Raise :class:`UsageError` if megatron-core is missing or not one that this program trains with."""
    try:
        import megatron.core
    except ImportError as error:
        raise UsageError(f"megatron-core cannot be imported ({error}); install it: pip install megatron-core") from None
    from ..hooks import check_version
    from ..hooks.versions import OLDEST_FOR_TRAIN

    check_version(megatron.core.__version__, OLDEST_FOR_TRAIN)


class OtherRankFailed(RuntimeError):
    """Another rank says what went wrong, and this one cannot go on without it."""


def told_to_end() -> None:
    """SIGTERM came. Under torchrun that is mostly because another rank failed; what fails on this one then, follows from it.

    But somebody else may have sent it, and then a failure is one.
    """
    global _told_to_end
    _told_to_end = True


@contextlib.contextmanager
def rank_errors(program: str) -> Iterator[None]:
    """After an error, end the process with status 1 at once: leaving process groups in order waits for the others.

    When a rank dies the others lose contact with it; they say so in a line. What :func:`usage_errors` reports passes.
    Any other error shows its traceback. Under torchrun one rank of a node speaks.
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
    """Whether ``error`` is that another rank cannot be reached."""
    import torch

    from ..transport.udp import PeerLost

    if isinstance(error, torch.distributed.DistError | PeerLost):
        return True
    # Gloo's collectives raise plain RuntimeError.
    return isinstance(error, RuntimeError) and "gloo" in str(error)
