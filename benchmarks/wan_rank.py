"""A rank of ``benchmarks.run_wan``: ``megatron_lossy.train`` with a stopwatch around what it sends.

    python -m benchmarks.wan_rank TIMES.json FLAGS…

TIMES.json gets, for each kind of communication, the seconds of this rank in each iteration: "grad" and "param" are the
two exchanges, "other" is every small collective between them, such as the norm of the gradients.
"""

from __future__ import annotations

import atexit
import functools
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_lossy.base.files import write_text


class Stopwatch:
    """Seconds by kind and iteration. An iteration begins after the reduce-scatter of the one before."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {"grad": [], "param": [], "other": []}
        self._inside = False

    def around(self, kind: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``call``, timed, with the calls that it makes."""

        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            if self._inside:
                return call(*arguments, **options)
            self._inside, started = True, time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                self._inside = False
                self._add(kind, time.perf_counter() - started)

        return timed

    def _add(self, kind: str, seconds: float) -> None:
        if kind == "grad":
            for values in self.seconds.values():
                values.append(0.0)
        if self.seconds["grad"]:
            self.seconds[kind][-1] += seconds


def main() -> None:
    """Train with a stopwatch."""
    times = sys.argv.pop(1)
    stopwatch = Stopwatch()
    atexit.register(lambda: write_text(times, json.dumps(stopwatch.seconds)))
    from megatron_lossy.lab.train.__main__ import main as train
    from megatron_lossy.lab.train.process import quiet_imports

    quiet_imports()
    import torch.distributed as dist

    from megatron_lossy.base import device

    device.prepare()
    from megatron.core.distributed import DistributedDataParallel

    DistributedDataParallel.finish_grad_sync = stopwatch.around("grad", DistributedDataParallel.finish_grad_sync)
    DistributedDataParallel.start_param_sync = stopwatch.around("param", DistributedDataParallel.start_param_sync)
    dist.all_reduce = stopwatch.around("other", dist.all_reduce)
    train()


if __name__ == "__main__":
    main()
