"""A real run: what the hooks know of Megatron's buckets, steps and replicas in this process."""

from __future__ import annotations

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..channel.corruption import make_corruption
from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..delivery_log.errors import recorded_events
from ..device.collectives import all_gather_single
from ..ledger import Ledger
from ..run import Run
from ..sync import FullReplicas, IslandWorld
from ..transport import LossyGroup
from .boundaries import Boundaries
from .buckets import bucket_sizes, buckets_by_stream, own_shard
from .complete import (
    check_exchanged,
    check_registered,
    warn_of_lossless,
    warn_of_one_replica,
    warn_of_reliable_boundaries,
)
from .exchanges import Exchanges
from .facts import of_model
from .islands import RankIslands
from .replicated import RankReplica
from .sampling import RankSampler
from .seam import all_reduce, slot_of
from .stale import load_stale_state, stale_state
from .versions import (
    data_parallel_rank,
    innermost,
    model_chunk,
    number_model_chunk,
    parallel_sizes,
)

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


class Lossy(Run):
    """An installed set of hooks, made by :func:`megatron_lossy.hooks.install`; one per process."""

    def __init__(
        self,
        config: LossyConfig,
        steps: int | None = None,
        gapless: bool = False,
        world: IslandWorld | None = None,
    ) -> None:
        super().__init__(config, steps, gapless, None if world is None else world.launched_rank)
        #: Of several islands, the one that this rank is in.
        self.islands = None
        if world is not None:
            self.islands = RankIslands(self, world, lambda: self.chunks, self.living_optimizers)
        if self.islands is not None and config.sync_method != "none":
            self.observers.append(self.islands.monitor)
        self.ledger = Ledger("megatron-core")
        self.installed = False
        self._optimizers: list[weakref.ref] = []  # Megatron's; the first one's gradient scaler scales the loss
        self._depth = 0
        self._successful = False
        self._chunks: weakref.WeakKeyDictionary[Any, list[LossyGroup]] = weakref.WeakKeyDictionary()
        self._all_reduced = False  # the gradients of this iteration
        self._told_all_reduce = False
        self._adding: dict[LossyGroup, tuple[torch.Tensor, Any]] = {}  # sums that are under way
        self._checked = False  # that all that is updated is exchanged
        self._corruption = make_corruption(config, recorded_events(config))
        self.exchanges = Exchanges(config, world, self._corruption, self.living_optimizers)
        #: With ``--p-act`` or ``--p-act-grad``.
        self.boundaries = Boundaries(self, self.exchanges.on_one_node) if config.loses_at_boundaries else None
        self._restored: int | None = None  # the update whose gather was made before a checkpoint
        #: Without the distributed optimizer, from the first model chunk on.
        self.replica: RankReplica | None = None

    def uninstall(self) -> None:
        """Put back everything that was patched. Models that were wrapped meanwhile go on without recovery state."""
        self.ledger.uninstall()
        super().uninstall()
        if self.islands is not None:
            self.islands.close()
        if self.boundaries is not None and self.boundaries.links is not None:
            self.boundaries.links.close()
        self.installed = False

    # --- what is lossy -------------------------------------------------------------------------------------------

    def add_model_chunk(self, ddp: DistributedDataParallel) -> None:
        """Make the exchanges of a model chunk lossy. A collective call: all ranks wrap their chunks alike."""
        if self.config.inert:
            return
        check_refusals(self.config, of_model(ddp))
        # Over all ranks, so before anything that only some of them have.
        if self.exchanges.find_nodes() and self.boundaries is not None:
            warn_of_reliable_boundaries(self.exchanges.nodes)
        if self.config.act_transport == "udp" and self.boundaries.links is None:
            from ..transport.udp.stages import StageLinks

            self.boundaries.links = StageLinks(self.config)
        number_model_chunk(ddp, len(self._chunks))
        if not ddp.ddp_config.use_distributed_optimizer:
            self._add_replica(ddp)
            return
        self._chunks[ddp] = self.exchanges.of_shards(ddp, self.steps)
        if self.boundaries is not None and self.config.virtual_boundaries is not None:
            self.boundaries.attach(ddp, functools.partial(data_parallel_rank, ddp))

    def _add_replica(self, ddp: DistributedDataParallel) -> None:
        if self.replica is None:
            self.replica = RankReplica(self.config, self._corruption, self.living_optimizers, self.loss_scale)
            self.after_update.append(lambda _: self.replica.finished())
        known = len(self.replica.streams)
        self.replica.add(ddp)
        replicas = self.replica.streams[known].group.size()
        check_refusals(self.config, of_model(ddp, workers=replicas))
        if not known:
            warn_of_one_replica(self.config, replicas)
        lossy = [] if self.config.untouched("grad") else self.replica.streams[known:]
        self._chunks[ddp] = [self.exchanges.of_replica(one, self.steps) for one in lossy]

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The model chunks whose exchanges are lossy, in order."""
        return sorted(self._chunks, key=model_chunk)

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for ddp in self.chunks for group in self._chunks[ddp]]

    # --- which step it is ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def optimizer_step(self, optimizer: Any, applies: bool) -> Iterator[None]:
        """Around every ``step`` (``applies`` false) and ``step_with_ready_grads`` (true) of Megatron's optimizers.

        They nest. An update begins on entry to the outermost ``step_with_ready_grads``, before any parameter is
        gathered; the iteration ends with the outermost of all.
        """
        if not self._depth:
            self._check_exchanges(optimizer)
            if self.replica is not None:
                self.replica.together.check()
            if self.islands is not None:
                self.islands.begin_iteration()
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
                if self.islands is not None:
                    self.islands.end_iteration()
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
        if self.replica is None and self.update is not None and self.update != self._restored:
            check_exchanged(self.groups, "param", self.update)

    def add_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer that has been made. Raises :class:`UsageError` if its loss scale cannot go with full replicas."""
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None and self.replica is not None:
            check_refusals(self.config, Facts(distributed_optimizer=False, loss_scale=scaler.scale.item()))
        self._optimizers = [*(known for known in self._optimizers if known() is not None), weakref.ref(optimizer)]

    def living_optimizers(self) -> list[Any]:
        """Megatron's optimizers that this process has, in the order in which they were made."""
        return [optimizer for known in self._optimizers if (optimizer := known()) is not None]

    def begin_update(self) -> None:
        super().begin_update()
        if self.replica is not None:
            self.replica.arrive()
        self._finish_adding()
        for ddp in self.chunks if self.config.param_send == "compensated" else ():
            for group, (_, _, pairs) in zip(self._chunks[ddp], buckets_by_stream(ddp), strict=True):
                if group.compensates:
                    group.before_update([own_shard(bucket, group.rank, group.size) for _, bucket in pairs])
                    self._agree(group, pairs[0][0].data_parallel_group)

    def _agree(self, group: LossyGroup, process_group: dist.ProcessGroup) -> None:
        """Let the ranks of a group add up what they count. It takes until the next update, so that nobody waits."""
        if group.counted is None:
            return
        group.counted.begin_update()
        sums = torch.from_numpy(group.counted.sums.copy()).to(self.device)
        self._adding[group] = (sums, dist.all_reduce(sums, group=process_group, async_op=True))

    def _finish_adding(self) -> None:
        for group, (sums, work) in self._adding.items():
            work.wait()
            group.counted.coming = sums.cpu().numpy()
        self._adding.clear()

    def loss_scale(self) -> torch.Tensor | None:
        optimizer = next(iter(self.living_optimizers()), None)
        scaler = getattr(optimizer, "grad_scaler", None)
        return scaler.scale if scaler is not None else None

    def reducing(self, bucket_group: Any) -> contextlib.AbstractContextManager[None]:
        """Around the start of the reduction of ``bucket_group``, which is an all-reduce without the distributed optimizer."""
        if self.replica is None:
            return contextlib.nullcontext()
        return all_reduce(
            partial(self.replica.before_reduction, bucket_group),
            lambda: self.replica.after_reduction(bucket_group, self.iteration),
        )

    def note_all_reduce(self, bucket_group: Any) -> None:
        """The gradients of ``bucket_group`` are about to be all-reduced, without loss. Say so once."""
        self._all_reduced = True
        for bucket in bucket_group.buckets:
            slot = slot_of(bucket.grad_data)
            if slot is not None and slot.group.wants_all_reduced(slot.bucket):
                with torch.no_grad():
                    scaled = bucket.grad_data * bucket.gradient_scaling_factor  # as Megatron is going to
                    scale = self.loss_scale()
                    slot.group.note_all_reduce(slot.bucket, scaled, self.iteration, scale, self.following)
        if not self._told_all_reduce and not self.config.untouched("grad"):
            self._told_all_reduce = True
            if dist.get_rank() == 0:
                logger.warning(
                    "iteration %d: Megatron all-reduces the gradients of this step, which therefore carries no "
                    "gradient loss (said once)",
                    self.iteration + 1,
                )

    def skip_iteration(self) -> None:
        if self.islands is not None:
            self.islands.end_iteration()
        super().skip_iteration()

    # --- what every run answers ------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return next((bucket.grad_data.device for bucket in self.buckets()), torch.device("cpu"))

    @property
    def streams(self) -> list[LossyGroup]:
        return self.groups

    @property
    def carriers(self) -> list[Any]:
        links = None if self.boundaries is None else self.boundaries.links
        islands = [] if self.islands is None else self.islands.links
        return [*super().carriers, *([] if links is None else links.all), *islands]

    def replicas(self) -> list[RankSampler]:
        result = []
        for ddp in self.chunks:
            streams = zip(self._chunks[ddp], buckets_by_stream(ddp), strict=True)
            for group, (_, _, pairs) in streams:
                result.append(RankSampler(group, pairs[0][0].data_parallel_group, pairs))
        return result

    def settle(self) -> None:
        with torch.no_grad():
            for ddp in self.chunks:
                for bucket_group in _bucket_groups(ddp):
                    _settle(bucket_group)

    @contextlib.contextmanager
    def owner_weights(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> Iterator[None]:
        """See :meth:`Run.owner_weights`. ``model_chunks``: what Megatron calls ``model``, wrapped in DDP or not."""
        if self.replica is not None:
            with self.replica.together.averaged():
                yield
            return
        restore = []
        with torch.no_grad():
            for bucket_group in self._lossy_bucket_groups(model_chunks):
                _settle(bucket_group)
                for bucket in bucket_group.buckets:
                    put_back = self._gather_reliably(bucket_group, bucket)
                    if put_back is not None:
                        restore.append(put_back)
        try:
            yield
        finally:
            with torch.no_grad():
                for put_back in restore:
                    put_back()

    @contextlib.contextmanager
    def consensus_weights(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> Iterator[None]:
        with self.owner_weights(model_chunks) if self.islands is None else self.islands.consensus():
            yield

    def _lossy_bucket_groups(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> list[Any]:
        if self.update is None or self.config.untouched("param"):
            return []
        chunks = model_chunks if isinstance(model_chunks, Sequence) else [model_chunks]
        wanted = {id(innermost(chunk)) for chunk in chunks}
        found = [ddp for ddp in self.chunks if id(innermost(ddp)) in wanted]
        if len(found) != len(wanted):
            raise ValueError(f"{len(wanted) - len(found)} of the given model chunks were not wrapped in Megatron's DDP")
        return [group for ddp in found for group in _bucket_groups(ddp)]

    def _gather_reliably(self, bucket_group: Any, bucket: Any) -> Callable[[], None] | None:
        slot = slot_of(bucket.param_data)
        put_back = slot.group.put_stale_aside(slot.bucket, bucket.param_data, self.update)
        if put_back is not None:
            group = bucket_group.intra_distributed_optimizer_instance_group
            all_gather_single(bucket.param_data, own_shard(bucket, slot.group.rank, slot.group.size), group=group)
        return put_back

    # --- saved replicas --------------------------------------------------------------------------------------------

    @property
    def full_replicas(self) -> FullReplicas | None:
        return None if self.replica is None else self.replica.together

    def happened(self) -> list[Any]:
        replica = [] if self.replica is None else self.replica.take(self.iteration)
        return [*super().happened(), *replica]

    def identity(self) -> dict[str, Any]:
        streams = [found for ddp in self.chunks for found in buckets_by_stream(ddp)]
        instances = {
            f"optimizer instances of {stream.name}": full.size() // pairs[0][0].data_parallel_group.size()
            for stream, full, pairs in streams
        }
        nodes = {} if self.exchanges.nodes is None else {"nodes of the ranks": " ".join(map(str, self.exchanges.nodes))}
        islands = {} if self.islands is None else self.islands.identity()
        sizes = {"world size": dist.get_world_size(), **islands, **parallel_sizes(), **nodes}
        return {**sizes, **instances, **bucket_sizes([(stream, pairs) for stream, _, pairs in streams])}

    def replica_file(self) -> str:
        return f"rank_{dist.get_rank():05d}.pt"

    def buckets(self) -> list[Any]:
        """Of all model chunks."""
        return [bucket for ddp in self.chunks for group in _bucket_groups(ddp) for bucket in group.buckets]

    def set_iteration(self, iteration: int) -> None:
        super().set_iteration(iteration)
        if self.replica is not None:
            self.replica.together.restart()
        if self.islands is not None:
            self.islands.check_iteration(iteration)

    def replica_state(self) -> Any:
        """See :func:`stale_state`; of a full replica all. With islands also what is under way between them."""
        if self.replica is not None:
            return self.replica.together.state_dict()
        if self.islands is not None:
            return {"stale": self._stale(), "islands": self.islands.state_dict()}
        return self._stale()

    def _stale(self) -> list[Any]:
        self._finish_adding()
        if any(group.compensates for group in self.groups):
            self.settle()  # of what is still to be gathered nobody would have the lead again
        return stale_state(self.buckets(), self.update)

    def load_replica_state(self, state: Any) -> None:
        if self.replica is not None:
            self.replica.together.load_state_dict(state)
            return
        if self.islands is not None:
            self.islands.load_state_dict(state["islands"])
            state = state["stale"]
        self._restored = self.update
        load_stale_state(self.buckets(), self.groups, self.update, state)


def _bucket_groups(ddp: Any) -> list[Any]:
    return ddp.bucket_groups + ddp.expert_parallel_bucket_groups


def _settle(bucket_group: Any) -> None:
    """Let the parameter gather of the last update happen, if it was left to overlap with the next forward."""
    overlapped = bucket_group.ddp_config.overlap_param_gather
    if overlapped and (not bucket_group.param_gather_dispatched or bucket_group.param_gather_handle is not None):
        bucket_group.start_param_sync(force_sync=True)
