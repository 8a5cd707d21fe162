"""What a user sees when an input is wrong: one line, exit status 2.

Every check of user input raises :class:`UsageError`, whose text names the flag, the value and what is
allowed. Programs wrap their main function in :func:`usage_errors`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import NoReturn

#: Seconds that all but the first rank of a node wait before they print their error.
_GRACE = 5.0


class UsageError(ValueError):
    """A wrong input; the text is one line that names the flag, the value and what is allowed."""


def refuse(flag: str, value: object, allowed: str) -> UsageError:
    """The :class:`UsageError` that says that ``flag`` may not be ``value``."""
    return UsageError(f"{flag} {value}: {allowed}")


class ArgumentParser(argparse.ArgumentParser):
    """A parser that raises :class:`UsageError` where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        """Called by argparse, with its own description of what is wrong."""
        raise UsageError(message.removeprefix("argument "))


@contextlib.contextmanager
def usage_errors(program: str = "megatron-lossy") -> Iterator[None]:
    """Print a :class:`UsageError` as one line and exit with status 2.

    The ranks of a node usually find the same error. The first (``LOCAL_RANK`` 0 or unset) prints it and exits, and
    the launcher ends the others while they wait; one that is still there afterwards was alone with its error and
    prints it too. The exit skips the clean-up of process groups, which would wait for other ranks.
    """
    try:
        yield
    except UsageError as error:
        sys.stdout.flush()
        if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
            time.sleep(_GRACE)
        print(f"{program}: error: {error}", file=sys.stderr, flush=True)
        os._exit(2)
