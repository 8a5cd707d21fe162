"""The rounds of gradients; the gather and the reduce-scatter of a parameter group, which FSDP2 calls instead of torch's.

FSDP2 asks for a buffer (``allocate``) and for the exchange (``__call__``). The buffer of the gather stays: it is this
rank's replica, in which a lost unit keeps the value that was received last. FSDP2 copies out of it into tensors that it
frees after use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist

from ..base.device import all_gather_single, reduce_scatter_single
from ..base.errors import refuse
from ..base.exchange import Exchange
from ..recovery import Gradients
from ..transport import LossyGroup, Transfer
from .layout import ParameterGroup
from .steps import Kind


class Round:
    """A round of gradient exchanges, and the optimizers that use it. ``finish``: ends it, since a new one follows.

    ``scaler``: a ``GradScaler``, if one is in use.
    """

    def __init__(self, finish: Callable[[], None], scaler: Any) -> None:
        self._finish, self._scaler = finish, scaler
        #: Optimizers that have taken part in the update, and the buckets that were reduced.
        self.stepped: dict[torch.optim.Optimizer, Kind] = {}
        self.reduced: set[object] = set()
        self._scale: float | None = None
        self.used = self.updates = False  # whether its gradients are in use, and its update

    def begin(self) -> None:
        """Begin the next round."""
        self.stepped, self.reduced, self._scale = {}, set(), None
        self.used = self.updates = False

    def gathering(self) -> None:
        """Note that parameters are about to be gathered: no further optimizer takes part in the update."""
        if self.stepped:
            self._finish()

    def reducing(self, bucket: object) -> None:
        """Note that the gradients of ``bucket`` are about to be reduced; again in the next round."""
        self.gathering()
        if bucket in self.reduced:
            self._finish()
        if not self.reduced and self._scaler is not None and self._scaler.is_enabled():
            self._scale = self._scaler.get_scale()
        self.reduced.add(bucket)

    def loss_scale(self) -> float | None:
        """Return the factor of the loss, if there is one."""
        return self._scale

    @property
    def rejected(self) -> bool:
        """Whether the scaler has rejected the gradients: its factor is smaller now."""
        return self._scale is not None and self._scaler.get_scale() < self._scale


class Handle(dist.Work):
    """``transfer`` as a handle, since FSDP2 waits for no other kind of object. Its wait completes the exchange."""

    def __init__(self, transfer: Transfer) -> None:
        super().__init__()
        self._transfer = transfer

    def wait(self, timeout: Any = None) -> bool:
        """Complete the exchange, recovery included, on the current stream."""
        self._transfer.wait()
        return True


def handle_of(transfer: Transfer, async_op: bool) -> Handle | None:
    """Return the handle of ``transfer`` for FSDP2, or ``None`` once the exchange is complete."""
    if async_op:
        return Handle(transfer)
    transfer.wait()
    return None


class GroupExchange:
    """An exchange of one parameter group, bucket ``number`` of ``lossy``. ``clock``: the run, :class:`.LossyFSDP`."""

    def __init__(self, clock: Any, group: ParameterGroup, lossy: LossyGroup, number: int) -> None:
        self._clock = clock
        self.group = group
        self.lossy = lossy
        self.number = number
        #: Bytes that this rank has sent to others.
        self.sent_bytes = 0


class Gather(GroupExchange):
    """The gather. ``reduce``: the group's reduce-scatter. ``before``: the exchanges that the group had.

    The first gather is reliable; so is one after weights were loaded. After an update, one gather sends something.
    Until the next update the replica answers, without a byte.
    """

    def __init__(self, clock: Any, group: ParameterGroup, lossy: LossyGroup, number: int) -> None:
        super().__init__(clock, group, lossy, number)
        self.reduce = Reduce(clock, group, lossy, number)
        self.before = group.exchanges
        self._restarts: int | None = None  # the run's count of restarts, when the replica was gathered
        self._update: int | None = None  # the update that was gathered
        self._version = 0  # of this rank's shard, when optimizers and mechanisms had last written it

    @cached_property
    def replica(self) -> torch.Tensor:
        """[N * shard]: this rank's replica; before the first gather an empty one of zeros."""
        size = self.lossy.shards * self.group.spec.shard_of("param")
        return torch.zeros(size, dtype=self.group.spec.param_dtype, device=self.group.device)

    @property
    def made(self) -> bool:
        """Whether the replica has been gathered."""
        return self._restarts is not None

    @property
    def fresh(self) -> bool:
        """Whether the replica has all that it will get of the last update."""
        return self._restarts == self._clock.restarts and self._update == self._clock.update

    @property
    def own(self) -> torch.Tensor:
        """[shard]: this rank's part of the replica."""
        return self.replica.chunk(self.lossy.shards)[self.lossy.own]

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the replica, into which FSDP2 copies this rank's shard before it calls for the gather."""
        self._clock.round.gathering()
        self._check(size, dtype)
        if not self.fresh:
            self._clock.updated()
        return self.replica

    def _check(self, size: Sequence[int], dtype: torch.dtype) -> None:
        wanted, spec = self.lossy.shards * self.group.spec.shard_of("param"), self.group.spec
        if (*size,) != (wanted,) or dtype != spec.param_dtype:
            raise refuse(
                "model",
                self.group.name,
                f"gathers {size[0]} elements of {dtype}; when make_lossy was called it had {wanted} of {spec.param_dtype}: "
                "change the model, and its mesh and types, before",
            )

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather ``input_tensor`` [shard] of all ranks into ``output_tensor`` [N * shard], the replica."""
        collective = partial(all_gather_single, output_tensor, input_tensor, group=group, async_op=async_op)
        first = self._restarts != self._clock.restarts
        if first:
            self.note_weights()
        else:
            self.check_weights()
        if self.fresh:
            return handle_of(Transfer(None), async_op)
        self._restarts, self._update = self._clock.restarts, self._clock.update
        if first or self._clock.update is None:
            self.sent_bytes += (self.lossy.shards - 1) * input_tensor.nbytes
            transfer = Transfer(collective())
        else:
            self.sent_bytes += self.lossy.sent_bytes("param", self.number, input_tensor)
            transfer = self.lossy.all_gather(self.number, output_tensor, input_tensor, self._clock.update, collective)
        return handle_of(transfer, async_op)

    def note_weights(self) -> None:
        """Note that this rank's shard is as optimizers and mechanisms left it."""
        self._version = self.group.version

    def check_weights(self) -> None:
        """Raise an error if other code has written this rank's shard, unless the next gather is reliable anyway."""
        if self.group.version != self._version and self._restarts == self._clock.restarts:
            raise RuntimeError(
                f"the weights of {self.group.name} were written, and not by a step of the optimizer that has ended: call "
                "weights_changed() of what make_lossy returned, on all ranks, after writing them"
            )


class Reduce(GroupExchange):
    """The reduce-scatter of gradients."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a buffer as torch's own reduce-scatter takes it."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Reduce ``input_tensor`` [N * shard] of all ranks, and put this rank's shard into ``output_tensor`` [shard]."""
        self._check(input_tensor)
        if op == dist.ReduceOp.PREMUL_SUM:  # of set_gradient_divide_factor; torchtitan sets 1 everywhere
            input_tensor.mul_(1 / self.group.divide_factor)
            op = dist.ReduceOp.SUM
        averaged = op == dist.ReduceOp.AVG
        assert averaged or op == dist.ReduceOp.SUM
        self._clock.round.reducing(self)
        self.sent_bytes += self.lossy.sent_bytes("grad", self.number, output_tensor)
        collective = partial(reduce_scatter_single, output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        exchange, scale = Exchange("grad", self.lossy.stream, self._clock.iteration), self._clock.round.loss_scale
        gapless = self._clock.gapless
        x = Gradients(exchange, self.number, input_tensor, output_tensor, collective, averaged, scale, gapless)
        transfer = self.lossy.reduce_scatter(x)
        return handle_of(transfer.then(lambda _: self.lossy.keep_lost(x.bucket, x.exchange.step)), async_op)

    def _check(self, sent: torch.Tensor) -> None:
        wanted, spec = self.lossy.shards * self.group.spec.shard, self.group.spec
        if sent.numel() != wanted or sent.dtype != spec.grad_dtype:
            raise refuse(
                "model",
                self.group.name,
                f"reduces {sent.numel()} elements of {sent.dtype}; its parameters with requires_grad have {wanted} of "
                f"{spec.grad_dtype}: freeze before make_lossy, and give unused ones a gradient "
                "(set_reduce_scatter_unused_params)",
            )
