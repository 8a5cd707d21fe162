"""A real run: the hooks' knowledge of Megatron's buckets, steps and replicas in this process."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..base.exchange import Exchange
from ..base.jobs import World
from ..base.ledger import Ledger
from ..base.registry import MECHANISMS
from ..config import LossyConfig
from ..recovery import Gradients
from ..run.base import ModelChunks, Run
from ..run.replicas import BucketReplica, RankReplicas, gathered_reliably, load_stale_state, stale_state
from ..transport import LossyGroup
from .buckets import bucket_sizes, buckets_by_stream, used_in
from .exchanges import Exchanges, check_exchanged, check_registered, warn_of_lossless
from .facts import of_model
from .seam import Slot, slot_of
from .versions import data_parallel_place, innermost, model_chunk, number_model_chunk, parallel_sizes

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


class Lossy(Run):
    """An installed set of hooks, made by :func:`megatron_lossy.hooks.install`; one per process."""

    kind = "Megatron"

    def __init__(
        self, config: LossyConfig, steps: int | None = None, gapless: bool = False, world: World | None = None
    ) -> None:
        super().__init__(config, steps, gapless, None if world is None else world.launched_rank)
        self.world = world
        self.ledger = Ledger("megatron-core")
        self.installed = False
        self._optimizers: list[weakref.ref] = []  # Megatron's
        self._depth = 0
        self._successful = False
        self._chunks: weakref.WeakKeyDictionary[Any, list[LossyGroup]] = weakref.WeakKeyDictionary()
        self._gathers = False  # whether some chunk gathers parameters
        self._all_reduced = False  # whether gradients of this iteration were
        self._told_all_reduce = False
        self._checked = False  # whether all buckets that are updated are known to be exchanged
        self.job, self.jobs = (0, 1) if world is None else world.job
        self.exchanges = Exchanges(config, (self.job, self.jobs), self.corruption)
        self._restored: int | None = None  # the update whose gather was made before a checkpoint
        #: Called with a bucket group before its all-reduce, and after it.
        self.around_all_reduce: tuple[Callable[[Any], None], Callable[[Any], None]] | None = None
        MECHANISMS.attach(self)

    def uninstall(self) -> None:
        """Put back everything that was patched. Models that were wrapped meanwhile go on without recovery state."""
        self.ledger.uninstall()
        super().uninstall()
        self.installed = False

    # --- what is lossy -------------------------------------------------------------------------------------------

    def add_model_chunk(self, ddp: DistributedDataParallel) -> None:
        """Make the exchanges of a model chunk lossy. A collective call: all ranks wrap their chunks alike."""
        if self.config.inert:
            return
        self.add_facts(of_model(ddp))
        self.events.chunk_comes(ddp)
        self.exchanges.find_nodes()
        number_model_chunk(ddp, len(self._chunks))
        sharded = ddp.ddp_config.use_distributed_optimizer
        self._gathers |= sharded
        self._chunks[ddp] = self.exchanges.of_shards(ddp, self.steps) if sharded else []
        self.events.chunk_added(ddp)

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The model chunks whose exchanges are lossy, in order."""
        return sorted(self._chunks, key=model_chunk)

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for ddp in self.chunks for group in self._chunks[ddp]]

    def exchanged(self) -> Iterator[tuple[LossyGroup, dist.ProcessGroup, list[tuple[Any, Any]]]]:
        """Yield the groups, the process group of each, and Megatron's (buffer, bucket) in canonical order."""
        for ddp in self.chunks:
            for group, (_, _, pairs) in zip(self._chunks[ddp], buckets_by_stream(ddp), strict=True):
                yield group, group.members or pairs[0][0].data_parallel_group, pairs

    # --- which step it is ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def optimizer_step(self, optimizer: Any, applies: bool) -> Iterator[None]:
        """Surround every ``step`` (``applies`` false) and ``step_with_ready_grads`` (true) of Megatron's optimizers.

        They nest. An update begins on entry to the outermost ``step_with_ready_grads``, before any parameter is
        gathered; the iteration ends with the outermost of all.
        """
        if not self._depth:
            self._check_exchanges(optimizer)
            self.events.iteration_begins()
        self._depth += 1
        if applies:
            if not self._successful:
                self.begin_update()
            self.update = self.iteration
            self._successful = True
        try:
            yield
            if self._depth == 1:
                all_reduced, self._all_reduced = self._all_reduced, False
                self.events.iteration_ends()
                self.finish_iteration(self._successful, all_reduced)
        finally:
            self._depth -= 1
            if not self._depth:
                self._successful = False

    def _check_exchanges(self, optimizer: Any) -> None:
        if not self._checked:
            check_registered(optimizer, self.chunks)
            warn_of_lossless(self.config, self.groups)
            self._checked = True
        if not self._all_reduced:
            check_exchanged(self.groups, "grad", self.iteration)
        if self._gathers and self.update is not None and self.update != self._restored:
            check_exchanged(self.groups, "param", self.update)

    def add_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that has been made. Raise :class:`UsageError` if it cannot go with a mechanism."""
        self.events.optimizer_added(optimizer)
        self._optimizers = [*(known for known in self._optimizers if known() is not None), weakref.ref(optimizer)]

    def living_optimizers(self) -> list[Any]:
        """See :meth:`Run.living_optimizers`: in the order in which they were made."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def note_all_reduce(self, bucket_group: Any) -> None:
        """Note that the gradients of ``bucket_group`` are about to be all-reduced, without loss. Logs it once."""
        self._all_reduced = True
        averaged = bucket_group.ddp_config.average_in_collective
        for bucket in bucket_group.buckets:
            slot = slot_of(bucket.grad_data)
            if slot is not None:
                with torch.no_grad():
                    scaled = partial(self._scaled, slot, bucket, averaged)
                    slot.group.note_all_reduce(slot.bucket, self.iteration, scaled)
        if not self._told_all_reduce and not self.config.untouched("grad"):
            self._told_all_reduce = True
            if dist.get_rank() == 0:
                text = "iteration %d: Megatron all-reduces the gradients of this step, which therefore carries no gradient loss"
                logger.warning(f"{text} (said once)", self.iteration + 1)

    def _scaled(self, slot: Slot, bucket: Any, averaged: bool) -> Gradients:
        """Return the gradients of ``bucket``, scaled as Megatron will scale them."""
        whole = torch.mul(bucket.grad_data, bucket.gradient_scaling_factor)
        exchange = Exchange("grad", slot.group.stream, self.iteration)
        how: dict[str, Any] = {"averaged": averaged, "loss_scale": self.loss_scale, "gapless": self.gapless}
        return Gradients(exchange, slot.bucket, whole, whole, **how)

    def skip_iteration(self) -> None:
        self.events.iteration_ends()
        super().skip_iteration()

    # --- what every run answers ------------------------------------------------------------------------------------

    @property
    def workers(self) -> int:
        return self.jobs * data_parallel_place()[1]

    @property
    def local(self) -> list[int]:
        rank, size = data_parallel_place()
        return [self.job * size + rank]

    @property
    def device(self) -> torch.device:
        buckets = (bucket for group in self._bucket_groups() for bucket in group.buckets)
        return next((bucket.grad_data.device for bucket in buckets), torch.device("cpu"))

    def replicas(self) -> list[RankReplicas]:
        return [
            RankReplicas(
                group, ranks, [group.view(bucket.param_data) for _, bucket in pairs], partial(used_in, pairs, group)
            )
            for group, ranks, pairs in self.exchanged()
        ]

    def settle(self) -> None:
        _settle(self._bucket_groups())

    @contextlib.contextmanager
    def exchanged_weights(self, model_chunks: ModelChunks) -> Iterator[None]:
        bucket_groups = self._lossy_bucket_groups(model_chunks)
        _settle(bucket_groups)
        with gathered_reliably(_held(bucket_groups), self.update):
            yield

    def _lossy_bucket_groups(self, model_chunks: ModelChunks) -> list[Any]:
        if self.update is None or self.config.untouched("param"):
            return []
        chunks = model_chunks if isinstance(model_chunks, Sequence) else [model_chunks]
        wanted = {id(innermost(chunk)) for chunk in chunks}
        found = [ddp for ddp in self.chunks if id(innermost(ddp)) in wanted]
        if len(found) != len(wanted):
            raise ValueError(f"{len(wanted) - len(found)} of the given model chunks were not wrapped in Megatron's DDP")
        return [group for ddp in found for group in _bucket_groups(ddp)]

    # --- saved replicas --------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        streams = [found for ddp in self.chunks for found in buckets_by_stream(ddp)]
        instances = {
            f"optimizer instances of {stream.name}": full.size() // pairs[0][0].data_parallel_group.size()
            for stream, full, pairs in streams
        }
        nodes = {} if self.exchanges.nodes is None else {"nodes of the ranks": " ".join(map(str, self.exchanges.nodes))}
        sizes = {"world size": dist.get_world_size(), **parallel_sizes(), **nodes}
        return {**sizes, **instances, **bucket_sizes([(stream, pairs) for stream, _, pairs in streams])}

    def _bucket_groups(self) -> list[Any]:
        return [group for ddp in self.chunks for group in _bucket_groups(ddp)]

    def exchanged_state(self) -> list[Any]:
        return stale_state(_held(self._bucket_groups()), self.update)

    def load_exchanged_state(self, state: list[Any]) -> None:
        self._restored = self.update
        load_stale_state(_held(self._bucket_groups()), self.update, state)


def _bucket_groups(ddp: Any) -> list[Any]:
    return ddp.bucket_groups + ddp.expert_parallel_bucket_groups


def _held(bucket_groups: Sequence[Any]) -> list[BucketReplica]:
    """Return this rank's replica of each bucket of Megatron's ``bucket_groups``."""
    return [
        BucketReplica(slot.group, slot.bucket, bucket.param_data, group.intra_distributed_optimizer_instance_group)
        for group in bucket_groups
        for bucket in group.buckets
        for slot in [slot_of(bucket.param_data)]
    ]


@torch.no_grad()
def _settle(bucket_groups: Sequence[Any]) -> None:
    """Complete the parameter gathers of the last update that were left to overlap with the next forward pass."""
    for group in bucket_groups:
        overlapped = group.ddp_config.overlap_param_gather
        if overlapped and (not group.param_gather_dispatched or group.param_gather_handle is not None):
            group.start_param_sync(force_sync=True)
