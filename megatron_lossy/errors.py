"""What a user sees when an input is wrong: one line, exit status 2.

Every check of user input raises :class:`UsageError`, whose text names the flag, the value and what is
allowed. Programs wrap their main function in :func:`usage_errors`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator


class UsageError(ValueError):
    """A wrong input; the text is one line that names the flag, the value and what is allowed."""


def refuse(flag: str, value: object, allowed: str) -> UsageError:
    """The :class:`UsageError` that says that ``flag`` may not be ``value``."""
    return UsageError(f"{flag} {value}: {allowed}")


@contextlib.contextmanager
def usage_errors(program: str = "megatron-lossy") -> Iterator[None]:
    """Print a :class:`UsageError` as one line and exit with status 2.

    All ranks of a node find the same error, so that only the first of them (``LOCAL_RANK`` 0 or unset)
    prints it. The exit skips the clean-up of process groups, which would wait for the other ranks.
    """
    try:
        yield
    except UsageError as error:
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
            print(f"{program}: error: {error}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)
