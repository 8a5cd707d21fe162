"""``python -m megatron_lossy.lab.launch.megatron_flags SCRIPT flags…``: does the Megatron next to SCRIPT take them?

Its own parser and its own validation decide. Our flags are added as the launcher of ``python -m megatron_lossy`` adds
them. Exit status 0, or 2 with one line. It is a process of its own, because Megatron reads ``sys.argv`` and keeps
state.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from pathlib import Path
from typing import NoReturn

from ...base.errors import UsageError, refuse, usage_errors


def check_flags(script: str, flags: list[str]) -> None:
    """Raise :class:`UsageError` if the Megatron next to ``script`` is unsupported, or refuses ``flags``."""
    sys.argv = [script, *flags]
    sys.path[0] = str(Path(script).resolve().parent)
    warnings.simplefilter("ignore")
    from ... import hooks
    from ...base import device
    from ...base.ledger import Ledger
    from ...config.refusal import check_refusals
    from ...hooks import megatron_training
    from ...hooks.facts import of_arguments
    from ...hooks.versions import how_to_import
    from ...plugin import parse_loss_flags

    try:
        import megatron.core
        import megatron.training.arguments as arguments
    except ImportError as error:
        allowed = f"megatron.training cannot be imported from its folder ({error}); {how_to_import(error)}"
        raise refuse("--program", script, allowed) from None
    hooks.check_version(megatron.core.__version__)
    on_cpu = device.prepare(megatron_training=True) == "cpu"
    Ledger("megatron.training").install(megatron_training.flag_patches())

    def refused(_: argparse.ArgumentParser, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    argparse.ArgumentParser.error = refused  # one line instead of usage and all flags
    with contextlib.redirect_stdout(io.StringIO()):
        args = arguments.parse_args()
        check_refusals(parse_loss_flags(flags), of_arguments(args))
        try:
            arguments.validate_args(args)
        except (AssertionError, ValueError) as error:
            raise UsageError("Megatron-LM says: " + (" ".join(str(error).split()) or "an assertion failed")) from None
        except Exception:
            # Some checks look for things that a login node lacks; on the machine that trains, every error counts.
            if not on_cpu:
                raise


def main() -> None:
    """Check the command line."""
    with usage_errors("megatron-lossy"):
        check_flags(sys.argv[1], sys.argv[2:])


if __name__ == "__main__":
    main()
