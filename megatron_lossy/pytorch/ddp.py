"""A run whose model is in ``DistributedDataParallel``: full replicas, whose all-reduces of gradients lose units.

DDP orders its buckets anew after its first backward pass, or with ``static_graph`` after the second, and its communication
hook shows them one by one. So rounds of gradients are reliable until the third at least, which has the buckets of the
second. Losses begin with the next one. With ``find_unused_parameters`` DDP never orders them anew: losses begin with the
second round, and a run that resumes has its buckets from its state, so that it goes on bit for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ..base.device import all_gather_single, reduce_scatter_single
from ..base.errors import refuse
from ..base.exchange import Delivery, Exchange
from ..base.registry import MECHANISMS
from ..config import PHASES, LossyConfig
from ..recovery import Gradients
from ..run.base import ObservedExchanges
from ..run.mechanism import Event
from ..transport import BucketSpec, LossyGroup, Network, Transfer, wire_for
from .base import LossyRun

logger = logging.getLogger(__name__)

#: Rounds of gradients before the buckets can be known to be final.
_ROUNDS = 3


@dataclass(frozen=True)
class Bucket:
    """A bucket of DDP: ``elements`` of ``dtype``, the gradients of ``parameters``."""

    elements: int
    dtype: torch.dtype
    parameters: tuple[torch.nn.Parameter, ...] = field(compare=False)
    names: tuple[int, ...]  # of the parameters, to compare them by

    @property
    def ranges(self) -> np.ndarray:
        """int64[1, 2]: the places of gradients; there is no padding."""
        return np.array([[0, self.elements]], dtype=np.int64)


def _bucket_of(parameters: Sequence[torch.nn.Parameter]) -> Bucket:
    elements = sum(parameter.numel() for parameter in parameters)
    return Bucket(elements, parameters[0].dtype, tuple(parameters), tuple(map(id, parameters)))


class _RoundExchanges:
    """The exchanges of ``group``, for observers: those of a round before the buckets were final lost nothing."""

    def __init__(self, group: LossyGroup) -> None:
        self._group = group

    def delivery(self, phase: str, step: int) -> Delivery | None:
        """See :class:`megatron_lossy.run.base.ObservedExchanges`."""
        return None if self._group.not_made(phase, step) else self._group.delivery(phase, step)


class LossyDDP(LossyRun):
    """The run of ``model``, a ``DistributedDataParallel``."""

    kind = "DDP"

    def __init__(
        self, config: LossyConfig, model: Any, optimizers: Sequence[torch.optim.Optimizer], **how: Any
    ) -> None:
        super().__init__(config, optimizers, **how)
        self.ranks: dist.ProcessGroup = model.process_group
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        #: The final buckets, once they are known.
        self.buckets: list[Bucket] = []
        self._nodes = self.nodes_of(dist.get_process_group_ranks(self.ranks))
        self._lossy: list[LossyGroup] = []
        self._learned: list[Bucket] = []  # of this round
        self._before: list[Bucket] = []  # of the last one
        self._rounds = 0  # that have ended
        self._stay = model.find_unused_parameters and not model.static_graph  # whether the first buckets are final
        self._known = False  # whether all buckets are known, and are final
        self._pending: list[tuple[Callable[[], None], torch.futures.Future[Any], torch.Tensor]] = []
        self._saved: list[Any] = []  # states of rules, until there are rules
        #: Are called with the number and the gradient [n] of a bucket: this rank's, divided by the number of ranks, before it is
        #: all-reduced; and the result.
        self.reduction_begins, self.reduction_ends = Event(), Event()
        #: Is called with the run once the final buckets are known.
        self.buckets_known = Event()
        MECHANISMS.attach(self)
        self._closed_hook = False
        try:
            model.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))
        except RuntimeError as error:
            if "register" not in str(error):
                raise
            why = "has a communication hook already, and torch allows one: omit it"
            raise refuse("model", type(model).__name__, why) from None
        self.events.chunk_added(self)

    # --- gradients -------------------------------------------------------------------------------------------------

    def _reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Return the mean of ``bucket`` over all ranks: DDP's communication hook."""
        number, gradient, last = bucket.index(), bucket.buffer(), bucket.is_last()
        self.round.reducing(number)
        gradient.mul_(1.0 / self.ranks.size())  # as DDP itself does
        if not self._known:
            self._learned.append(_bucket_of(bucket.parameters()))
        finish = self._begin(number, gradient)
        cuda = [gradient.device] if gradient.is_cuda else []
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=cuda)
        self._pending.append((finish, future, gradient))
        if last:  # until now backward passes went on
            pending, self._pending = self._pending, []
            for end, promised, result in pending:
                end()
                promised.set_result(result)
            self._end_round()
        return future

    def _begin(self, number: int, gradient: torch.Tensor) -> Callable[[], None]:
        """Begin the reduction of a bucket. Return a function that ends it."""
        if self._closed_hook or not self._known or self._lossy[0].lossless("grad"):
            work = dist.all_reduce(gradient, group=self.ranks, async_op=True)

            def end_reliable() -> None:
                work.wait()
                if self._known and not self._closed_hook:
                    self.reduction_ends(number, gradient)

            return end_reliable
        known = self.buckets[number] if number < len(self.buckets) else None
        if known is None or known.elements != gradient.numel():
            raise RuntimeError(
                f"DDP's bucket {number} has {gradient.numel()} elements, and had {known and known.elements} when the buckets were "
                "final: its parameters changed after make_lossy"
            )
        self.reduction_begins(number, gradient)
        exchange = Exchange("grad", self._lossy[0].stream, self.iteration)
        x = Gradients(exchange, number, gradient, gradient, loss_scale=self.loss_scale, gapless=self.gapless)
        transfer = _begin_all_reduce(self._lossy[0], x, self.ranks)

        def end() -> None:
            transfer.wait()
            self.reduction_ends(number, gradient)

        return end

    def _end_round(self) -> None:
        self._rounds += 1
        learned, self._learned = self._learned, []
        before, self._before = self._before, learned
        if self._known or not (self._stay or (self._rounds >= _ROUNDS and learned == before)):
            return
        self._set_buckets(learned)
        if not self.config.untouched("grad") and dist.get_rank() == 0:
            text = "iteration %d: DDP's buckets are final; gradients of earlier iterations lost nothing"
            logger.warning(text, self.iteration + 2)

    def _set_buckets(self, buckets: list[Bucket]) -> None:
        """Take the final buckets."""
        self.buckets, self._known = buckets, True
        size = self.ranks.size()
        config = self.config.drawn_with("param")  # both halves lose as gradients do
        networks = {phase: Network(config, phase, size, self._nodes) for phase in PHASES}
        specs = [BucketSpec(-(-bucket.elements // size), bucket.dtype, bucket.dtype) for bucket in buckets]
        wire = wire_for(config, specs, networks, range(size), self.ranks.rank(), self.stream, self.steps, self.ranks)
        self._lossy = [LossyGroup(config, wire)]
        for group, saved in zip(self._lossy, self._saved):
            group.load_state_dict(saved, self.device)
        self._saved = []
        self.buckets_known(self)

    # --- what every run answers ------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def groups(self) -> list[LossyGroup]:
        return self._lossy

    @property
    def streams(self) -> Sequence[ObservedExchanges]:
        return [_RoundExchanges(group) for group in self._lossy]

    def living_optimizers(self) -> list[Any]:
        return [SimpleNamespace(optimizer=optimizer) for optimizer in self.optimizers]

    def identity(self) -> dict[str, Any]:
        elements = sum(parameter.numel() for parameter in self.parameters)
        return {"world size": self.ranks.size(), "parameters": elements}

    def _state(self) -> dict[str, Any]:
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
        buckets = [[numbers[name] for name in bucket.names] for bucket in self.buckets]
        return {**super()._state(), "buckets": buckets if self._stay else []}

    def _load_state(self, state: Any) -> None:
        if self._stay and not self._known and state.get("buckets"):
            every = ([self.parameters[number] for number in bucket] for bucket in state["buckets"])
            self._set_buckets([_bucket_of(parameters) for parameters in every])
        if not self._lossy:  # rules come with the final buckets
            self._saved = list(state["recovery"])
            state = {**state, "recovery": []}
        super()._load_state(state)

    def restore_exchanges(self) -> None:
        """Let the hook, which torch cannot take away, average as DDP itself does."""
        self._closed_hook = True


def _begin_all_reduce(group: LossyGroup, x: Gradients, ranks: dist.ProcessGroup) -> Transfer:
    """Begin to all-reduce the gradients ``x``, whose buffer [n] changes in place. The wait for the result ends it.

    In a reduce-scatter owners recover losses as always. They then send the reduced gradient to all ranks. For a unit that
    does not arrive, a rank keeps its own gradient, so that replicas drift apart (docs/corruption.md).
    """
    gradient, step = x.buffer, x.exchange.step
    shard = -(-len(gradient) // group.size)
    sent = gradient.new_zeros(group.size * shard)
    sent[: len(gradient)] = gradient
    result = sent * group.size  # the sum as a rank estimates it from its own gradient
    own = torch.empty_like(result[:shard])
    scatter = partial(reduce_scatter_single, own, sent, group=ranks, async_op=True)
    gather = partial(all_gather_single, result, own, group=ranks, async_op=True)
    transfer = group.reduce_scatter(replace(x, buffer=sent, output=own, collective=scatter))

    def finish(_: Any) -> None:
        group.all_gather(x.bucket, result, own, step, gather).wait()
        gradient.copy_(result[: len(gradient)])

    return transfer.then(finish)
