"""Full replicas in one process: N workers, each with all weights and all of the optimizer, take turns on one model.

An iteration: each worker's micro-batches leave a gradient in Megatron's buffer, which is added to a sum, in the order
of the workers. Then each worker gets the sum, with errors of its own, and makes its update. For two workers the result
equals that of two ranks, bit for bit; for more up to rounding, since ranks add up in another order. That is why the sums
are this module's own; :class:`.held.HeldReplicas` is the rest of real and virtual replicas.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from ...config import LossyConfig
from ...hooks.buckets import bucket_sizes
from ...run.weights import ModelChunks
from ...transport import LossyGroup
from .base import VirtualRun
from .replica_workers import LossyReduction, WorkerReplicas


class VirtualReplicas(VirtualRun):
    """Workers that each have all of the optimizer. While nothing can make them differ, one stands for all."""

    def __init__(self, config: LossyConfig, workers: int, steps: int | None = None, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, gapless)
        self.held = WorkerReplicas(workers)
        self.add_part(self.held)
        self._sums: list[list[torch.Tensor]] = []  # by stream and bucket
        self._collected = 0
        self._lossy: list[LossyReduction] = []  # by stream, if gradients are lost
        #: Whether workers can ever differ.
        self.differ = workers > 1 and config.drives_apart

    # --- building ------------------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # without the distributed optimizer nothing is padded

    def _add(self, ddp: Any) -> None:
        self._parameters = list(ddp.parameters())
        self.held.add(ddp)
        for one in self.held.streams:
            self._sums.append([torch.empty_like(bucket.grad_data) for bucket in one.buckets])
            if not self.config.untouched("grad"):
                self._lossy.append(LossyReduction(self.config, one, self.workers, self.steps))

    # --- an iteration --------------------------------------------------------------------------------------------

    def _replica(self, worker: int) -> contextlib.AbstractContextManager[None]:
        return self.held.turn(worker)

    def _collect_of(self, worker: int) -> None:
        for stream, sums in enumerate(self._sums):
            buckets = self.held.streams[stream].buckets
            for number, bucket in enumerate(buckets if self.held.wants_gradient else ()):
                norm = torch.linalg.vector_norm(bucket.grad_data, dtype=torch.float32)
                self.held.note(stream, worker, number, float(norm) ** 2)  # replicas that differ have no loss scale
            if not self._transformer.calculate_per_token_loss:
                for bucket in buckets:
                    bucket.grad_data *= 1.0 / self.workers  # as each rank does
            if self._lossy:
                gradients = [bucket.grad_data for bucket in buckets]
                self._lossy[stream].collect(worker, gradients, self.iteration, self)
            else:
                for bucket, into in zip(buckets, sums, strict=True):
                    if self._collected:
                        into += bucket.grad_data
                    else:
                        into.copy_(bucket.grad_data)
            for bucket in buckets:
                bucket.grad_data.zero_()
        self._collected += 1

    def step(self, optimizer: Any) -> Any:
        self._collected = 0
        self.events.iteration_begins()
        scale = self._per_token()
        if self.differ:
            self.held.begin()
        with torch.no_grad():
            for one in self._lossy:
                one.reduce()
            self._check(scale)
            self.begin_update()
            results = [self._update(worker, optimizer, scale) for worker in range(self.workers if self.differ else 1)]
            successful = all(bool(result[0]) for result in results)
            if successful:
                self.update = self.iteration
        self.events.iteration_ends()
        self.finish_iteration(successful)
        return results[0]

    def _check(self, scale: float | None) -> None:
        """Compare what the workers get, if it is asked for."""
        together, own = self.held.together, self.held.own
        if together is None or not together.checks:
            return
        if not own:
            own += [[list(map(torch.empty_like, sums)) for _ in range(self.workers)] for sums in self._sums]
        for worker in range(self.workers):
            self._reduce(worker, [kept[worker] for kept in own], scale)
        together.check()

    def _reduce(self, worker: int, into: list[list[torch.Tensor]], scale: float | None) -> None:
        """Put the reduced gradients, as ``worker`` gets them, into ``into``."""
        for stream, sums in enumerate(self._sums):
            if self._lossy:
                sums = self._lossy[stream].gather(worker, self.iteration)
            for bucket, (buffer, reduced) in enumerate(zip(into[stream], sums, strict=True)):
                buffer.copy_(reduced[: len(buffer)])
                self.held.hit(stream, worker, bucket, buffer)
                if scale is not None:
                    buffer *= scale

    def _update(self, worker: int, optimizer: Any, scale: float | None) -> Any:
        buffers = [[bucket.grad_data for bucket in one.buckets] for one in self.held.streams]
        with self._replica(worker):
            if self.held.own:
                for into, own in zip(buffers, self.held.own, strict=True):
                    for buffer, value in zip(into, own[worker], strict=True):
                        buffer.copy_(value)
            else:
                self._reduce(worker, buffers, scale)
            return optimizer.step()

    # --- answers of every run --------------------------------------------------------------------------------------

    def exchanged_weights(self, model_chunks: ModelChunks) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # while one stands for all

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for one in self._lossy for group in one.groups]

    @property
    def streams(self) -> list[LossyReduction]:
        return self._lossy

    def replicas(self) -> list[Any]:
        return []

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    def identity(self) -> dict[str, Any]:
        sizes = bucket_sizes([(one.stream, one.pairs) for one in self.held.streams])
        return {"workers": self.workers, "--use-distributed-optimizer": "off", **sizes}

    def exchanged_state(self) -> None:
        """``None``: while one stands for all, there is nothing to save."""

    def load_exchanged_state(self, state: None) -> None:
        """Do nothing."""
