"""How a rank's process starts, and how it ends when something goes wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator

from ..errors import UsageError, is_unread, machine_error


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


@contextlib.contextmanager
def rank_errors(program: str) -> Iterator[None]:
    """After an error, end the process with status 1 at once: leaving process groups in order waits for the others.

    When a rank dies the others lose contact with it; they say so in a line. What :func:`usage_errors` reports passes.
    Any other error shows its traceback.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, UsageError) or is_unread(error):
            raise
        if failed := machine_error(error):
            raise failed from None
        reason = " ".join(str(error).split())[:200]
        if isinstance(error, OtherRankFailed):
            text = reason
        elif lost_contact(error):
            text = f"lost contact with another rank ({reason})"
        else:
            text = f"an error\n{traceback.format_exc()}"
        print(f"{program}: rank {os.environ.get('RANK', '0')} stops: {text}", file=sys.stderr)
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
