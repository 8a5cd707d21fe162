"""``python -m megatron_lossy.train``, under torchrun or alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ...base.errors import usage_errors
from ...base.jobs import launched_ranks
from .arguments import configurations, make_parser, read_arguments
from .process import quiet_imports, rank_errors, require_megatron

PROGRAM = "megatron_lossy.train"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    with usage_errors(PROGRAM):
        what = "Pretrain a LLaMA-style model over a lossy data-parallel exchange."
        parser = make_parser(f"python -m {PROGRAM}", what)
        namespace = read_arguments(parser, sys.argv[1:] if arguments is None else arguments)
        config, lossy_config = configurations(namespace)
        config.check_world(launched_ranks())
        with rank_errors(PROGRAM):
            quiet_imports()
            require_megatron()
            # Wrong flags are found before this import, because it takes seconds.
            from .loop import train

            diverged = train(config, lossy_config)["diverged"]
        if diverged:
            if os.environ.get("RANK", "0") == "0":
                print(f"{PROGRAM}: stopped: {diverged}", file=sys.stderr)
            sys.exit(1)


if __name__ == "__main__":
    main()
