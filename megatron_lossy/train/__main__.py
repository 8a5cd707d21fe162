"""``python -m megatron_lossy.train``, under torchrun or alone."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Sequence

from ..errors import UsageError, usage_errors
from .arguments import configurations, launched_ranks, make_parser, read_arguments

_PROGRAM = "megatron_lossy.train"


@contextlib.contextmanager
def rank_errors() -> Iterator[None]:
    """End the process with status 1 after an error, at once: leaving process groups in order would wait for others.

    When a rank dies the others lose contact with it; they say so in a line. Any other error shows its traceback.
    """
    try:
        yield
    except (UsageError, KeyboardInterrupt):
        raise
    except Exception as error:
        rank = os.environ.get("RANK", "0")
        if _lost_contact(error):
            reason = " ".join(str(error).split())[:200]
            print(f"{_PROGRAM}: rank {rank} stops: another rank is gone ({reason})", file=sys.stderr)
        elif type(error).__name__ == "Diverged":
            print(f"{_PROGRAM}: rank {rank} stops: {error}", file=sys.stderr)
        else:
            print(f"{_PROGRAM}: rank {rank} stops:\n{traceback.format_exc()}", file=sys.stderr)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _lost_contact(error: Exception) -> bool:
    import torch

    if isinstance(error, torch.distributed.DistError):
        return True
    # Gloo's collectives raise plain RuntimeError.
    return isinstance(error, RuntimeError) and "gloo" in str(error)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train as the command line says."""
    with usage_errors(_PROGRAM):
        parser = make_parser(f"python -m {_PROGRAM}", "Pretrain a LLaMA-style model over a lossy data-parallel exchange.")
        namespace = read_arguments(parser, sys.argv[1:] if arguments is None else arguments)
        config, lossy = configurations(namespace)
        config.check_world(launched_ranks())
        with rank_errors():
            # Wrong flags are found before these imports, which take seconds.
            from .loop import train

            train(config, lossy)


if __name__ == "__main__":
    main()
