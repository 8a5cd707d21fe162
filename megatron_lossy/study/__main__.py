"""``python -m megatron_lossy.study``: many runs that answer one question.

python -m megatron_lossy.study FILE.yaml …    run the study in a file, and report it (docs/study.md)
python -m megatron_lossy.study table1 …       the paper's Table 1, Figures 1 and 2
python -m megatron_lossy.study lag --p P …    how late replicas are, and what to set (docs/lag.md)
python -m megatron_lossy.study link …         which method fits a link between sites (docs/choosing.md)
python -m megatron_lossy.study fct FILE.yaml  how long messages take between data centers (docs/fct.md)
torchrun … -m megatron_lossy.study sweep …    one training at several loss rates, in one launch
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import UsageError, usage_errors

PROGRAM = "megatron_lossy.study"


def main(arguments: Sequence[str] | None = None) -> None:
    """Do what the command line says; wrong input is one line and exit status 2."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["sweep"]:
        from . import sweep

        sweep.main(arguments[1:])
        return
    sys.stdout.reconfigure(errors="replace")  # "±" on an ASCII terminal
    with usage_errors(PROGRAM):
        if not arguments or arguments[0] in ("-h", "--help"):
            print(__doc__)
            if arguments:
                return
            raise UsageError("needs a study file, table1, lag, link, fct or sweep")
        if arguments[0] == "lag":
            from . import lag

            lag.main(arguments[1:])
            return
        if arguments[0] == "link":
            from . import link

            link.main(arguments[1:])
            return
        if arguments[0] == "fct":
            from . import fct

            fct.main(arguments[1:])
            return
        from . import commands

        if arguments[0] == "table1":
            sys.exit(commands.table1(arguments[1:]))
        sys.exit(commands.study(arguments))


if __name__ == "__main__":
    main()
