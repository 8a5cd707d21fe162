"""``python -m megatron_lossy.lab``: studies, which are many runs that answer one question, and what needs no run.

python -m megatron_lossy.lab FILE.yaml …    run the study in a file, and report it (docs/study.md)
python -m megatron_lossy.lab FILE.yaml NAME …  the same, of a file that holds several
python -m megatron_lossy.lab report DIR …   the tables and figures of reports again, from their study.json
python -m megatron_lossy.lab lag --p P …    how late replicas are, and what to set (docs/lag.md)
python -m megatron_lossy.lab trace FILE.csv --out FILE.npz  a measurement of lost packets, for --trace (docs/semantics.md)
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from ..base.errors import UsageError, usage_errors

PROGRAM = "megatron_lossy.lab"
#: Modules that have a command of their name.
_MODULES = {"lag": ".studies.lag", "trace": ".trace"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; wrong input is one line and exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    sys.stdout.reconfigure(errors="replace")  # "±" on an ASCII terminal
    with usage_errors(PROGRAM):
        if not arguments or arguments[0] in ("-h", "--help"):
            print(__doc__)
            if arguments:
                return
            raise UsageError("needs a study file, report, lag or trace")
        command, *rest = arguments
        if command in _MODULES:
            importlib.import_module(_MODULES[command], __package__).main(rest)
            return
        from .studies import commands

        if command == "report":
            commands.report(rest)
            return
        sys.exit(commands.study(arguments))


if __name__ == "__main__":
    main()
