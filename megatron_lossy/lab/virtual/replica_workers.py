"""The full replicas of all virtual workers."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ...base.errors import refuse
from ...mechanisms.replicas.held import HeldReplicas
from ...mechanisms.replicas.repair import Buckets
from ...mechanisms.replicas.streams import Main, Mains, ReplicaStream
from ...mechanisms.replicas.synchroniser import Tensors
from ...transport.peers import LocalPeers, Peers
from .replica_states import TrainingStates


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

    def add(self, ddp: Any) -> None:
        super().add(ddp)
        self._parameters += ddp.parameters()

    def begin(self) -> None:
        """Give every worker a state of its own, unless it has one."""
        if self._states is not None:
            return
        if self._run.loss_scale() is not None:
            why = "replicas of virtual workers would change it in turns; needs real ranks, or --bf16 alone"
            raise refuse("--loss-scale", f"{float(self.unit()):g}", why)
        self._states = TrainingStates(self._parameters, self._run.living_optimizers(), self._peers.size)

    @property
    def kept(self) -> TrainingStates:
        """The workers' states. Call :meth:`begin` first."""
        assert self._states is not None
        return self._states

    def peers_of(self, one: ReplicaStream) -> Peers:
        return self._peers

    def turn(self, replica: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._states is None else self._states.turn(replica)

    def gradients(self, stream: int) -> Buckets:
        return [[[buffer] for buffer in own] for own in self.own[stream]]

    def weights(self, replica: int, own: Sequence[Main]) -> list[torch.Tensor]:
        return self.kept.weights(replica, own)

    def states(self, replica: int, own: Sequence[Main]) -> list[dict[str, Any]]:
        return self.kept.moments(replica, own)

    def models(self, mains: Mains) -> Sequence[Tensors]:
        return [partial(self.kept.copies, worker) for worker in self._peers.local]

    def load_replica_state(self, state: Any) -> None:
        self.begin()
        super().load_replica_state(state)

    def restart(self, iteration: int) -> None:
        if self._states is not None:
            self._states.spread()
        super().restart(iteration)
