"""1F1B without a flush: the batches of each stage of an asynchronous pipeline, in order (docs/async_pipeline.md).

PipeDream (SOSP 2019, section 3.2), with an update after every global batch as in AsyncMesh (section 3). Stage s of P is
P-1-s batches ahead of its updates. In iteration n it goes forward through batch n+P-1-s, then backward through batch n,
and updates its weights. So a batch goes forward and backward at the weights after max(0, batch - (P-1-s)) updates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Pass:
    """A step of a stage with one micro-batch: ``receive`` its input, go ``forward``, or go ``backward``.

    ``batch``: in the whole run, from 0. ``micro``: the micro-batch in it.
    """

    kind: str
    batch: int
    micro: int


@dataclass(frozen=True)
class Stage:
    """Stage ``number`` of ``stages``, from 0."""

    number: int
    stages: int

    @property
    def first(self) -> bool:
        return self.number == 0

    @property
    def last(self) -> bool:
        return self.number == self.stages - 1

    @property
    def delay(self) -> int:
        """The number of batches that this stage is ahead of its updates, and of updates that its gradients are late."""
        return self.stages - 1 - self.number

    def version(self, batch: int) -> int:
        """The number of updates in the weights that compute ``batch``."""
        return max(0, batch - self.delay)

    def filled(self, iteration: int, iterations: int) -> int:
        """The next batch to go forward when ``iteration``, of ``iterations``, begins in the middle of a run."""
        return min(iteration + self.delay, iterations)

    def passes(
        self, iteration: int, iterations: int, micro_batches: int, forwarded: int, received: int
    ) -> Iterator[Pass]:
        """The steps of the stage in ``iteration`` of ``iterations`` before its update, in order.

        ``forwarded``, ``received``: the next batch to go forward, and the next to be received. If the pipe is full
        these are :meth:`filled`, and one more. If it is empty, both are ``iteration``: then the pipe is filled first.

        A message has the same place in the order of both its ends: activations of a batch leave a stage before the
        gradients of the batch in that stage come back. So an end may wait for the other end, or for its own earlier
        messages.
        """
        ahead = self.filled(iteration, iterations)
        for batch in range(forwarded, ahead):
            for micro in range(micro_batches):
                yield from self._receive(batch, micro, received)
                yield Pass("forward", batch, micro)
        if ahead < iterations:
            for micro in range(micro_batches):
                yield from self._receive(ahead, micro, received)
        for micro in range(micro_batches):
            if ahead + 1 < iterations:
                yield from self._receive(ahead + 1, micro, received)
            if ahead < iterations:
                yield Pass("forward", ahead, micro)
            yield Pass("backward", iteration, micro)

    def _receive(self, batch: int, micro: int, received: int) -> Iterator[Pass]:
        if not self.first and batch >= received:
            yield Pass("receive", batch, micro)
