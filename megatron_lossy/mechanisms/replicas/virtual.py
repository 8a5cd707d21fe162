"""Full replicas in one process: N workers, each with all weights and all of the optimizer, take turns on one model.

An iteration: each worker's micro-batches leave a gradient in Megatron's buffer, which is added to a sum, in the order
of the workers. Then each worker gets the sum, with errors of its own, and makes its update. For two workers the result
equals that of two ranks, bit for bit; for more up to rounding, since ranks add up in another order.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from functools import partial
from typing import Any

import psutil
import torch

from ...channel.corruption import Errors, make_corruption
from ...config import LossyConfig
from ...delivery_log.errors import recorded_events
from ...errors import refuse
from ...exchange import Exchange
from ...hooks.buckets import bucket_sizes
from ...peers import LocalPeers
from ...transport import LossyGroup
from ...virtual.base import VirtualRun
from .full_replicas import FullReplicas, Gradients
from .ranks import Mains, ReplicaStream, main_parameters, renew, streams_of, total
from .reduction import LossyReduction
from .states import TrainingStates
from .synchroniser import Copies

# Bytes per element: weights and two moments in float32, and a copy of the weights in the model's precision or of the
# gradients; and the gradients of a worker, if they are kept for comparison or as substitutes for lost ones.
_BYTES, _OF_GRADIENTS = 16, 4


class VirtualReplicas(VirtualRun):
    """Workers that each have all of the optimizer. While nothing can make them differ, one stands for all."""

    def __init__(self, config: LossyConfig, workers: int, steps: int | None = None, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, gapless)
        self._replica_streams: list[ReplicaStream] = []
        self._peers = LocalPeers(workers)
        self._corruption = make_corruption(config, recorded_events(config))
        self._errors: list[list[Errors]] = []  # by stream and worker
        self._sums: list[list[torch.Tensor]] = []  # by stream and bucket
        self._own: list[list[list[torch.Tensor]]] = []  # by stream, worker and bucket, if they are compared
        self._squares: list[list[float]] = []  # by stream and worker
        self._collected = 0
        self._states: TrainingStates | None = None
        self._together: FullReplicas | None = None
        self._lossy: list[LossyReduction] = []  # by stream, if gradients are lost
        #: Whether workers can ever differ.
        self.differ = workers > 1 and config.drives_apart
        self.after_update.append(lambda _: self._finished())

    # --- building ------------------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # without the distributed optimizer nothing is padded

    def _add(self, ddp: Any) -> None:
        self._parameters = list(ddp.parameters())
        self._check_memory()
        records = self.config.delivery_log is not None
        for one in streams_of(ddp):
            ranks = range(self.workers) if self.config.grad_error_at == "broadcast" else [0] * self.workers
            self._replica_streams.append(one)
            self._errors.append([one.errors(self._corruption, rank, records) for rank in ranks])
            self._sums.append([torch.empty_like(bucket.grad_data) for bucket in one.buckets])
            self._squares.append([0.0] * self.workers)
            if not self.config.untouched("grad"):
                self._lossy.append(LossyReduction(self.config, one, self.workers, self.steps))

    def _check_memory(self) -> None:
        elements = sum(parameter.numel() for parameter in self._parameters)
        kept = (self.config.replica_check != "none") + (not self.config.untouched("grad"))
        needed = elements * (_BYTES + kept * _OF_GRADIENTS) * self.workers
        there = psutil.virtual_memory().available
        if self.device.type == "cuda":
            there = torch.cuda.mem_get_info(self.device)[0]
        if self.differ and needed > there:
            raise refuse(
                "--virtual-workers",
                self.workers,
                f"full replicas of {elements} parameters take {needed / 2**30:.1f} GiB, of {there / 2**30:.1f} GiB that are free",
            )

    # --- an iteration --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _replica(self, worker: int) -> Iterator[None]:
        with contextlib.nullcontext() if self._states is None else self._states.turn(worker):
            yield

    def _collect_of(self, worker: int) -> None:
        for stream, sums in enumerate(self._sums):
            buckets = self._replica_streams[stream].buckets
            if self.full_replicas is not None and self.full_replicas.wants_gradient:
                norms = [torch.linalg.vector_norm(bucket.grad_data, dtype=torch.float32) for bucket in buckets]
                self._squares[stream][worker] = sum(float(norm) ** 2 for norm in norms) / self._unit() ** 2
            if not self._transformer.calculate_per_token_loss:
                for bucket in buckets:
                    bucket.grad_data *= 1.0 / self.workers  # as each rank does
            if self._lossy:
                gradients = [bucket.grad_data for bucket in buckets]
                self._lossy[stream].collect(worker, gradients, self.iteration, self.loss_scale(), self.following)
            else:
                for bucket, into in zip(buckets, sums, strict=True):
                    if self._collected:
                        into += bucket.grad_data
                    else:
                        into.copy_(bucket.grad_data)
            for bucket in buckets:
                bucket.grad_data.zero_()
        self._collected += 1

    def _unit(self) -> float:
        scale = self.loss_scale()
        return 1.0 if scale is None else float(scale)

    def step(self, optimizer: Any) -> Any:
        self._collected = 0
        scale = self._per_token()
        self._make_states()
        together = self.full_replicas
        with torch.no_grad():
            for one in self._lossy:
                one.reduce()
            if together is not None and together.checks:
                if not self._own:
                    self._own = [
                        [list(map(torch.empty_like, sums)) for _ in range(self.workers)] for sums in self._sums
                    ]
                for worker in range(self.workers):
                    self._reduce(worker, [own[worker] for own in self._own], scale)
                together.check()
            self.begin_update()
            if together is not None:
                together.arrive(self._gradient())
            results = [self._update(worker, optimizer, scale) for worker in range(self.workers if self._states else 1)]
            successful = all(bool(result[0]) for result in results)
            if successful:
                self.update = self.iteration
        self.finish_iteration(successful)
        return results[0]

    def _make_states(self) -> None:
        if self.differ and self._states is None:
            if self.loss_scale() is not None:
                why = "replicas of virtual workers would change it in turns; needs real ranks, or --bf16 alone"
                raise refuse("--loss-scale", f"{self._unit():g}", why)
            self._states = TrainingStates(self._parameters, self._optimizers(), self.workers)

    def _reduce(self, worker: int, into: list[list[torch.Tensor]], scale: float | None) -> None:
        """Put the reduced gradients, as ``worker`` gets them, into ``into``."""
        for stream, (one, sums) in enumerate(zip(self._replica_streams, self._sums, strict=True)):
            exchange = Exchange("grad", one.stream, self.iteration)
            if self._lossy:
                sums = self._lossy[stream].gather(worker, self.iteration)
            for bucket, (buffer, reduced) in enumerate(zip(into[stream], sums, strict=True)):
                buffer.copy_(reduced[: len(buffer)])
                if self.workers > 1:  # else nothing is sent
                    self._errors[stream][worker].hit(exchange, bucket, buffer, self._unit)
                if scale is not None:
                    buffer *= scale

    def _update(self, worker: int, optimizer: Any, scale: float | None) -> Any:
        buffers = [[bucket.grad_data for bucket in one.buckets] for one in self._replica_streams]
        with self._replica(worker):
            if self._own:
                for into, own in zip(buffers, self._own, strict=True):
                    for buffer, value in zip(into, own[worker], strict=True):
                        buffer.copy_(value)
            else:
                self._reduce(worker, buffers, scale)
            return optimizer.step()

    def _gradient(self) -> list[list[float]] | None:
        together = self.full_replicas
        return self._squares if together is not None and together.wants_gradient else None

    def _finished(self) -> None:
        if self.full_replicas is not None:
            self.full_replicas.finished(self._gradient())

    # --- answers of every run --------------------------------------------------------------------------------------

    def happened(self) -> list[Any]:
        once = 1 if self.config.grad_error_at == "reduce" else self.workers
        reductions = [one for errors in self._errors for own in errors[:once] for one in own.take(self.iteration)]
        together = self.full_replicas
        return reductions if together is None else [*reductions, *together.take()]

    @property
    def full_replicas(self) -> FullReplicas | None:
        if self._states is None:
            return None
        if self._together is None:
            numbers = {id(main): number for number, main in enumerate(self._states.mains)}
            mains = main_parameters(self._optimizers())
            gradients, copies = [], []
            for number, one in enumerate(self._replica_streams):
                own = [numbers[id(mains[parameter][0])] for parameter in one.parameters if parameter in mains]
                aside = all(mains[parameter][0] is not parameter for parameter in one.parameters if parameter in mains)
                replicas = [self._states.replica(worker, own, aside) for worker in range(self.workers)]
                gradients.append(Gradients(one.stream, self._peers, partial(self._own_of, number)))
                copies.append(Copies(one.stream.name, self._peers, replicas))
            models = [partial(self._states.copies, worker) for worker in range(self.workers)]
            renews = partial(self._renew, mains)
            self._together = FullReplicas(self.config, gradients, copies, total, renews, models)
        return self._together

    def _own_of(self, stream: int) -> list[list[list[torch.Tensor]]]:
        return [[[buffer] for buffer in own] for own in self._own[stream]]

    def _renew(self, mains: Mains, names: Collection[str]) -> None:
        for worker in range(self.workers):
            with self._replica(worker):
                renew(self._replica_streams, names, mains)

    def owner_weights(self, model_chunks: Any) -> contextlib.AbstractContextManager[None]:
        """A context in which the model has the mean of the finite workers."""
        together = self.full_replicas
        return contextlib.nullcontext() if together is None else together.averaged()

    def set_iteration(self, iteration: int) -> None:
        super().set_iteration(iteration)
        if self._states is not None:
            self._states.spread()
            self.full_replicas.restart()

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
        sizes = bucket_sizes([(one.stream, one.pairs) for one in self._replica_streams])
        return {"workers": self.workers, "--use-distributed-optimizer": "off", **sizes}

    def replica_state(self) -> dict[str, Any] | None:
        return None if self.full_replicas is None else self.full_replicas.state_dict()

    def load_replica_state(self, state: dict[str, Any] | None) -> None:
        if state is not None:
            self._make_states()
            self.full_replicas.load_state_dict(state)
