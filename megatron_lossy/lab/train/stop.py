"""The end of a run that a signal tells to stop: after one iteration, the same on all ranks, with a checkpoint."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ...base import device
from ...base.registry import first
from ...run.base import Run
from .process import told_to_end

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """The signals of this rank, and the agreement of all ranks of ``run`` on them. ``saves``: a checkpoint is written."""

    def __init__(self, run: Run, saves: bool) -> None:
        self._run, self._saves = run, saves
        self._number = 0

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """A context in which signals are noted instead of ending the process."""
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, _: Any) -> None:
        self._number = number
        if number == signal.SIGTERM:
            told_to_end()
        if number == signal.SIGINT:
            # A second signal ends this rank at once. A second Ctrl-C at torchrun arrives as SIGTERM.
            for again in _SIGNALS:
                signal.signal(again, signal.SIG_DFL)
            if torch.distributed.get_rank() == 0:
                saves = ", with a checkpoint" if self._saves else "; without --save nothing is kept"
                # The signal may have interrupted print().
                os.write(1, f"stopping after this iteration{saves}; Ctrl-C again ends at once\n".encode())

    def begin(self) -> Callable[[], int]:
        """Begin to agree whether to stop, so that all leave after the same iteration.

        Returns a function that waits for the signal that told any rank to stop, or 0.
        """
        agreement: Callable[[], int] | None = first(part.begin_stopping(self._number) for part in self._run.parts)
        if agreement is not None:
            return agreement
        stop = torch.full((1,), self._number, dtype=torch.int32, device=device.current_device())  # not copied there
        work = torch.distributed.all_reduce(stop, op=torch.distributed.ReduceOp.MAX, async_op=True)

        def finish() -> int:
            work.wait()
            return int(stop.item())

        return finish
