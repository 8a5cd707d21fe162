"""All-reduces that lose data, of all virtual workers: :mod:`megatron_lossy.transport.all_reduce` in one process.

Workers bring their gradients one after another, and may ask for the result twice, so that the halves are apart here.
"""

from __future__ import annotations

from functools import partial

import torch

from ...base.exchange import Delivery, Exchange
from ...config import LossyConfig
from ...run.base import Run
from ...transport import Transfer
from ...transport.all_reduce import padded, specs_of
from ...transport.in_memory import groups_in_memory
from .streams import ReplicaStream


class LossyReduction:
    """The gradients of one stream between ``workers``. ``steps``: length of the run, if known."""

    def __init__(self, config: LossyConfig, one: ReplicaStream, workers: int, steps: int | None) -> None:
        config = config.all_reduced()
        gradients = [bucket.grad_data for bucket in one.buckets]
        self._stream = one.stream
        self._workers = workers
        specs = specs_of(gradients, workers)
        self._memory, self.groups = groups_in_memory(config, specs, one.stream, range(workers), workers, steps)
        self._sums = [flat.new_empty(workers * spec.shard) for flat, spec in zip(gradients, specs, strict=True)]
        self._own: list[list[torch.Tensor]] = []  # for each worker, the sum as it would be with its own gradients alone
        self._begun: list[Transfer] = []

    def collect(self, worker: int, gradients: list[torch.Tensor], step: int, run: Run) -> None:
        """Take the ``gradients`` of ``worker`` in ``step``, scaled as ranks scale them. Call it in the order of the
        workers. ``run``: theirs.
        """
        if worker == 0:
            self._own = []
        own = []
        for number, (gradient, total) in enumerate(zip(gradients, self._sums, strict=True)):
            sent = padded(gradient, self._workers)
            own.append(sent * self._workers)
            shard = len(total) // self._workers
            output = total[worker * shard : (worker + 1) * shard]

            def add(sent: torch.Tensor = sent, total: torch.Tensor = total) -> None:
                if worker:
                    total += sent
                else:
                    total.copy_(sent)

            group = self.groups[worker]
            self._begun.append(
                group.reduce_scatter(number, sent, output, step, add, False, run.loss_scale, run.gapless)
            )
        self._own.append(own)

    def reduce(self) -> None:
        """Let every owner correct its shard of the sum."""
        for transfer in self._begun:
            transfer.wait()
        self._begun = []

    def gather(self, worker: int, step: int) -> list[torch.Tensor]:
        """The reduced gradients of all buckets as ``worker`` gets them, without padding at the end."""
        for number, (mine, total) in enumerate(zip(self._own[worker], self._sums, strict=True)):
            shard = len(total) // self._workers
            sent = total[worker * shard : (worker + 1) * shard]
            self.groups[worker].all_gather(number, mine, sent, step, partial(_copy, mine, total)).wait()
        return self._own[worker]

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """The delivery at all workers in ``step``; ``None`` in a phase without loss."""
        if self.groups[0].lossless(phase):
            return None
        return self._memory.foresee(Exchange(phase, self._stream, step))


def _copy(into: torch.Tensor, total: torch.Tensor) -> None:
    into.copy_(total)
