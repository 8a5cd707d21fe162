"""``python -m megatron_lossy.train``, whose islands take each other for dead sooner: tests need not wait half a minute for each start."""

from __future__ import annotations

from dataclasses import replace

from megatron_lossy.lab.train.__main__ import main
from megatron_lossy.mechanisms.islands import first_rank


def hurry() -> None:
    """Shorten the times of islands."""
    first_rank.TIMES = replace(first_rank.TIMES, poll=0.5, silent=6.0, connect=6.0, quiet=3.0, again=5.0, read=2.0)


if __name__ == "__main__":
    hurry()
    main()
