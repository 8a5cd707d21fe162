"""The full replica of a rank whose model is in PyTorch's ``DistributedDataParallel`` (docs/pytorch.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ...channel.corruption.applied import Errors
from ...transport.peers import Peers, RankPeers
from .held import HeldReplicas
from .ranks import warn_of_one_replica
from .repair import Buckets
from .streams import ReplicaStream

if TYPE_CHECKING:
    from ...pytorch.ddp import LossyDDP


class DDPReplica(HeldReplicas):
    """The full replica of this rank. Buckets are known later than parameters; until then gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self._final: list[Any] = []  # DDP's buckets

    def attach(self, run: LossyDDP) -> None:
        super().attach(run)
        run.events.on(chunk_added=self.add_model_chunk, iteration_begins=self.begin_iteration)
        run.buckets_known.append(self.know_buckets)
        run.reduction_begins.append(self.before_reduction)
        run.reduction_ends.append(self.after_reduction)

    def add_model_chunk(self, ddp: LossyDDP) -> None:
        """Register the parameters of ``ddp``, whose buckets are not known yet."""
        self.add([ReplicaStream(ddp.stream, ddp.ranks, [], list(ddp.parameters))])
        warn_of_one_replica(ddp.config, ddp.ranks.size())

    def know_buckets(self, ddp: LossyDDP) -> None:
        """Use the final buckets of ``ddp`` from now on."""
        self._final = ddp.buckets
        ranks = self.peers[0].local if self._run.config.grad_error_at == "broadcast" else [0]
        self._errors = [[self.errors_of(self.streams[0], rank) for rank in ranks]]

    def errors_of(self, stream: ReplicaStream, rank: int) -> Errors:
        dtypes = [bucket.dtype for bucket in self._final] or [torch.float32]
        return self._run.errors_of(dtypes, [bucket.ranges for bucket in self._final], rank)

    def before_reduction(self, bucket: int, gradient: torch.Tensor) -> None:
        """Note the length of this rank's ``gradient`` [n], if it is needed."""
        if self.wants_gradient:
            local = gradient * (self.peers[0].size / self.unit())  # DDP has divided it
            self.note(0, 0, bucket, torch.linalg.vector_norm(local, dtype=torch.float32) ** 2)

    def after_reduction(self, bucket: int, gradient: torch.Tensor) -> None:
        """Let errors hit ``gradient`` [n], which this rank received."""
        with torch.no_grad():
            self.hit(0, 0, bucket, gradient)

    def begin_iteration(self) -> None:
        if self._final:
            super().begin_iteration()

    def peers_of(self, stream: ReplicaStream) -> Peers:
        return RankPeers(stream.group, stream.parameters[0].device)

    def gradients(self, stream: int) -> Buckets:
        """Return the gradients of each bucket, which DDP has copied to their parameters."""
        grads = ([parameter.grad for parameter in bucket.parameters] for bucket in self._final)
        present = ([gradient for gradient in tensors if gradient is not None] for tensors in grads)
        return [[tensors for tensors in present if tensors]]
