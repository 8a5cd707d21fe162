"""The full replica of a rank whose model is in PyTorch's ``DistributedDataParallel`` (docs/pytorch.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...channel.corruption import Errors
from ...transport.peers import Peers, RankPeers
from .held import HeldReplicas
from .optimizers import Main, Mains
from .ranks import warn_of_one_replica
from .repair import Buckets
from .streams import ReplicaStream
from .synchroniser import Tensors

if TYPE_CHECKING:
    from ...pytorch.ddp import LossyDDP


class DDPReplica(HeldReplicas):
    """The full replica of this rank. Buckets are known later than parameters; until then gradients are equal."""

    def __init__(self) -> None:
        super().__init__()
        self._final: list[Any] = []  # DDP's buckets

    @property
    def there(self) -> bool:
        return bool(self.streams)

    # --- building --------------------------------------------------------------------------------------------------

    def add_model_chunk(self, ddp: LossyDDP) -> None:
        self.add_streams([ReplicaStream(ddp.stream, ddp.ranks, [], list(ddp.parameters))])
        warn_of_one_replica(ddp.config, ddp.ranks.size())

    def know_buckets(self, ddp: LossyDDP) -> None:
        self._final = ddp.buckets
        self._errors = [[self.errors_of(self.streams[0], rank) for rank in self._ranks_that_err()]]

    def _ranks_that_err(self) -> list[int]:
        return list(self.peers[0].local) if self._run.config.grad_error_at == "broadcast" else [0]

    def errors_of(self, one: ReplicaStream, rank: int) -> Errors:
        dtypes = [bucket.dtype for bucket in self._final] or [torch.float32]
        return self._run.errors_of(dtypes, [bucket.ranges for bucket in self._final], rank)

    # --- an iteration ----------------------------------------------------------------------------------------------

    def before_reduction(self, bucket: int, gradient: torch.Tensor) -> None:
        if self.wants_gradient:
            local = gradient * (self.peers[0].size / self.unit())  # DDP has divided it
            self.note(0, 0, bucket, torch.linalg.vector_norm(local, dtype=torch.float32) ** 2)

    def after_reduction(self, bucket: int, gradient: torch.Tensor) -> None:
        with torch.no_grad():
            self.hit(0, 0, bucket, gradient)

    def begin_iteration(self) -> None:
        if self.together is not None and self._final:
            self.together.check()

    # --- what a rank has -------------------------------------------------------------------------------------------

    def peers_of(self, one: ReplicaStream) -> Peers:
        return RankPeers(one.group, one.parameters[0].device)

    def turn(self, replica: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gradients(self, stream: int) -> Buckets:
        """The gradients of each bucket, which DDP has copied to their parameters."""
        grads = ([one.grad for one in bucket.parameters if one.grad is not None] for bucket in self._final)
        return [[tensors for tensors in grads if tensors]]

    def weights(self, replica: int, own: Sequence[Main]) -> list[torch.Tensor]:
        return [main.data for main, _ in own]

    def states(self, replica: int, own: Sequence[Main]) -> list[dict[str, Any]]:
        return [inner.state.get(main, {}) for main, inner in own]

    def models(self, mains: Mains) -> Sequence[Tensors]:
        return []
