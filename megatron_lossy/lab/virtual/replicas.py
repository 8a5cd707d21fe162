"""Full replicas in one process: N workers, each with all weights and all of the optimizer, take turns on one model.

An iteration: each worker's micro-batches leave a gradient in Megatron's buffer, which is added to a sum, in the order
of the workers. Then each worker gets the sum, with errors of its own, and makes its update. For two workers the result
equals that of two ranks, bit for bit; for more up to rounding, since ranks add up in another order. That is why the sums
are this module's own; :class:`.held.HeldReplicas` is the rest of real and virtual replicas.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ...base.errors import refuse
from ...config import LossyConfig
from ...hooks.buckets import bucket_sizes
from ...mechanisms.replicas.held import HeldReplicas
from ...mechanisms.replicas.repair import Buckets
from ...mechanisms.replicas.streams import Main, Mains, ReplicaStream, streams_of
from ...mechanisms.replicas.synchroniser import Tensors
from ...transport import LossyGroup
from ...transport.peers import LocalPeers, Peers
from .base import VirtualRun


@dataclass
class _State:
    """One worker's state: the data of all weights, the state of each main weight, the ``step`` of groups with one."""

    weights: list[torch.Tensor]
    moments: list[dict[str, Any]]
    steps: list[Any]


class TrainingStates:
    """``count`` complete training states, weights and optimizer state, one at a time in the model by pointer.

    They are of the model with ``parameters`` and Megatron's ``optimizers``, and all begin as these are. Gradients are no part of them.

    The first is in the model until :meth:`turn`, and between turns.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], optimizers: Sequence[Any], count: int) -> None:
        self._inner = [optimizer.optimizer for optimizer in optimizers if optimizer.optimizer is not None]
        groups = [(inner, group) for inner in self._inner for group in inner.param_groups]
        self._mains = [(inner, main) for inner, group in groups for main in group["params"]]
        self._numbers = {id(main): number for number, (_, main) in enumerate(self._mains)}
        copies = [weights for weights in parameters if weights.requires_grad and id(weights) not in self._numbers]
        self._tensors = [*(main for _, main in self._mains), *copies]
        self._count = count
        self.spread()

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for inner in self._inner for group in inner.param_groups if "step" in group)

    def _steps(self) -> list[Any]:
        return [copy.copy(group["step"]) for group in self._groups()]

    @contextlib.contextmanager
    def turn(self, worker: int) -> Iterator[None]:
        """Return a context in which the model and its optimizer have the state of ``worker``."""
        self._put(worker)
        try:
            yield
        finally:
            self._states[worker].steps = self._steps()
            self._put(0)

    def _put(self, worker: int) -> None:
        state = self._states[worker]
        for tensor, data in zip(self._tensors, state.weights, strict=True):
            tensor.data = data
        for (inner, main), moments in zip(self._mains, state.moments, strict=True):
            inner.state[main] = moments
        for group, step in zip(self._groups(), state.steps):
            group["step"] = copy.copy(step)

    def spread(self) -> None:
        """Give every worker a copy of the state in the model: a loaded checkpoint may have replaced its tensors."""
        moments = [inner.state[main] for inner, main in self._mains]
        here = _State([tensor.data for tensor in self._tensors], moments, self._steps())
        self._states = [here, *(copy.deepcopy(here) for _ in range(1, self._count))]

    def weights(self, worker: int, own: Sequence[Main]) -> list[torch.Tensor]:
        """Return the main weights ``own`` of ``worker``."""
        return [self._states[worker].weights[self._numbers[id(main)]] for main, _ in own]

    def moments(self, worker: int, own: Sequence[Main]) -> list[dict[str, Any]]:
        """Return the state, in torch's optimizers, of each of the main weights ``own`` of ``worker``."""
        return [self._states[worker].moments[self._numbers[id(main)]] for main, _ in own]

    def copies(self, worker: int) -> list[torch.Tensor]:
        """Return the weights of the model of ``worker`` that are copies of main weights."""
        return self._states[worker].weights[len(self._mains) :]


class WorkerReplicas(HeldReplicas):
    """The replicas of ``workers``. Until :meth:`begin` the model stands for all."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self._peers = LocalPeers(workers)
        self._parameters: list[torch.nn.Parameter] = []
        self._states: TrainingStates | None = None
        #: By stream, worker and bucket: the reduced gradients, if they are compared.
        self.own: list[list[list[torch.Tensor]]] = []

    @property
    def there(self) -> bool:
        return self._states is not None

    def add_model_chunk(self, ddp: Any) -> None:
        """Register the buckets of ``ddp``."""
        self.add(streams_of(ddp))
        self._parameters += ddp.parameters()

    def begin(self) -> None:
        """Give every worker a state of its own, unless it has one."""
        if self._states is not None:
            return
        if self._run.loss_scale() is not None:
            why = "replicas of virtual workers would change it in turns; needs real ranks, or --bf16 alone"
            raise refuse("--loss-scale", f"{float(self.unit()):g}", why)
        self._states = TrainingStates(self._parameters, self._run.living_optimizers(), self._peers.size)

    def peers_of(self, stream: ReplicaStream) -> Peers:
        return self._peers

    def turn(self, replica: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._states is None else self._states.turn(replica)

    def gradients(self, stream: int) -> Buckets:
        return [[[buffer] for buffer in own] for own in self.own[stream]]

    def weights(self, replica: int, own: Sequence[Main]) -> list[torch.Tensor]:
        return self._states.weights(replica, own)

    def states(self, replica: int, own: Sequence[Main]) -> list[dict[str, Any]]:
        return self._states.moments(replica, own)

    def models(self, mains: Mains) -> Sequence[Tensors]:
        return [partial(self._states.copies, worker) for worker in self._peers.local]

    def load_replica_state(self, state: Any) -> None:
        self.begin()
        super().load_replica_state(state)

    def restart(self, iteration: int) -> None:
        if self._states is not None:
            self._states.spread()
        super().restart(iteration)


class VirtualReplicas(VirtualRun):
    """Workers that each have all of the optimizer. While nothing can make them differ, one stands for all."""

    def __init__(self, config: LossyConfig, workers: int, steps: int | None = None, gapless: bool = False) -> None:
        super().__init__(config, workers, steps, gapless)
        self.held = WorkerReplicas(workers)
        self.add_part(self.held)
        self._sums: list[list[torch.Tensor]] = []  # by stream and bucket
        self._collected = 0
        #: Whether workers can ever differ.
        self.differ = workers > 1 and config.errs_apart

    def _add(self, ddp: Any) -> None:
        self._parameters = list(ddp.parameters())
        self.held.add_model_chunk(ddp)
        for stream in self.held.streams:
            self._sums.append([torch.empty_like(bucket.grad_data) for bucket in stream.buckets])

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
            for bucket, into in zip(buckets, sums, strict=True):
                if self._collected:
                    into += bucket.grad_data
                else:
                    into.copy_(bucket.grad_data)
                bucket.grad_data.zero_()
        self._collected += 1

    def step(self, optimizer: Any) -> Any:
        self._collected = 0
        self.events.iteration_begins()
        scale = self._per_token()
        if self.differ:
            self.held.begin()
        with torch.no_grad():
            self._check(scale)
            self.begin_update()
            results = [self._update(worker, optimizer, scale) for worker in range(self.workers if self.differ else 1)]
            if successful := all(bool(result[0]) for result in results):
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
            for bucket, (buffer, reduced) in enumerate(zip(into[stream], sums, strict=True)):
                buffer.copy_(reduced)
                self.held.hit(stream, worker, bucket, buffer)
                if scale is not None:
                    buffer *= scale

    def _update(self, worker: int, optimizer: Any, scale: float | None) -> Any:
        buffers = [[bucket.grad_data for bucket in stream.buckets] for stream in self.held.streams]
        with self._replica(worker):
            if self.held.own:
                for into, own in zip(buffers, self.held.own, strict=True):
                    for buffer, value in zip(into, own[worker], strict=True):
                        buffer.copy_(value)
            else:
                self._reduce(worker, buffers, scale)
            return optimizer.step()

    @property
    def groups(self) -> list[LossyGroup]:
        return []

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    def identity(self) -> dict[str, Any]:
        sizes = bucket_sizes([(stream.stream, stream.pairs) for stream in self.held.streams])
        return {"workers": self.workers, "--use-distributed-optimizer": "off", **sizes}
