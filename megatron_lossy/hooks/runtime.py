"""The state behind the hooks: which iteration it is, which groups lose data, which replicas are stale."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..config import PHASES, LossyConfig
from ..exchange import Stream
from ..ledger import Ledger
from ..monitor import Drift, Observer, metrics_of, save_records
from ..run import make_observers
from ..transport import BucketSpec, LossyGroup, Network, find_nodes
from .checks import check_ddp
from .rank_replicas import RankReplicas
from .replicas import load_replicas, save_replicas
from .seam import Slot, attach, slot_of
from .versions import dense_buffers, expert_rank, full_group, innermost, model_chunk, number_model_chunk, pipeline_stage

if TYPE_CHECKING:
    from megatron.core.distributed import DistributedDataParallel

logger = logging.getLogger(__name__)


class LossyRuntime:
    """Everything the hooks know. Made by :func:`megatron_lossy.hooks.install`; one per process.

    ``iteration`` counts attempted iterations; gradient draws of the next one are keyed by it. ``update`` is the
    iteration of the last successful update, which keys parameter draws; ``None`` while all replicas are equal.
    """

    def __init__(self, config: LossyConfig, steps: int | None = None) -> None:
        self.config = config
        self.steps = steps
        self.iteration = 0
        self.update: int | None = None
        self._optimizer: weakref.ref | None = None  # the one whose gradient scaler scales the loss
        self._depth = 0
        self._successful = False
        self._chunks: weakref.WeakKeyDictionary[Any, list[LossyGroup]] = weakref.WeakKeyDictionary()
        self._networks: dict[tuple[str, tuple[int, ...]], Network] = {}
        self._all_reduced = False  # the gradients of this iteration
        self._told_all_reduce = False
        self.observers: list[Observer] = [] if config.lossless else make_observers(config)
        self._drift = next((observer for observer in self.observers if isinstance(observer, Drift)), None)

    # --- what is lossy -------------------------------------------------------------------------------------------

    def add_model_chunk(self, ddp: DistributedDataParallel) -> None:
        """Make the exchanges of a model chunk lossy. A collective call: all ranks wrap their chunks alike."""
        if self.config.lossless:
            return
        check_ddp(ddp, self.config)
        number_model_chunk(ddp, len(self._chunks))
        self._chunks[ddp] = [
            self._add_group(buckets, full, stream) for stream, full, buckets in buckets_by_stream(ddp)
        ]

    def _add_group(self, buckets: Sequence[tuple[Any, Any]], full: dist.ProcessGroup, stream: Stream) -> LossyGroup:
        part = buckets[0][0].data_parallel_group  # of one optimizer instance
        full_ranks = dist.get_process_group_ranks(full)
        members = [full_ranks.index(rank) for rank in dist.get_process_group_ranks(part)]
        specs = [
            BucketSpec(bucket.grad_data.numel() // len(members), bucket.grad_data.dtype, bucket.param_data.dtype)
            for _, bucket in buckets
        ]
        networks = {phase: self._network(phase, full, full_ranks) for phase in PHASES}
        group = LossyGroup(self.config, specs, networks, members, dist.get_rank(part), stream, self.steps)
        for number, (_, bucket) in enumerate(buckets):
            attach(bucket.grad_data, Slot(group, number))
            attach(bucket.param_data, Slot(group, number))
        return group

    def _network(self, phase: str, full: dist.ProcessGroup, full_ranks: list[int]) -> Network:
        key = (phase, tuple(full_ranks))
        if key not in self._networks:
            nodes = None
            if self.config.lossy_links == "inter-node":
                nodes = find_nodes(full, self.config.ranks_per_node)
            self._networks[key] = Network(self.config, phase, len(full_ranks), nodes)
        return self._networks[key]

    @property
    def chunks(self) -> list[DistributedDataParallel]:
        """The model chunks whose exchanges are lossy, in order."""
        return sorted(self._chunks, key=model_chunk)

    @property
    def groups(self) -> list[LossyGroup]:
        """All lossy groups of this rank."""
        return [group for ddp in self.chunks for group in self._chunks[ddp]]

    # --- which step it is ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def optimizer_step(self, applies: bool) -> Iterator[None]:
        """Around every ``step`` (``applies`` false) and ``step_with_ready_grads`` (true) of Megatron's optimizers.

        They nest. An update begins on entry to the outermost ``step_with_ready_grads``, before any parameter is
        gathered; the iteration ends with the outermost of all.
        """
        self._depth += 1
        if applies:
            if self._drift is not None and not self._successful:
                self._drift.before_update(self.iteration, self._replicas)
            self.update = self.iteration
            self._successful = True
        try:
            yield
            if self._depth == 1:
                self._finish_iteration()
        finally:
            self._depth -= 1
            if not self._depth:
                self._successful = False

    def _finish_iteration(self) -> None:
        for group in self.groups:
            group.finish_step(self.iteration, self._successful)
        self._tell_observers()
        self._measure_drift()
        self._all_reduced = False
        self.iteration += 1
        for group in self.groups:
            group.prepare(self.iteration)

    def _tell_observers(self) -> None:
        if not self.observers:
            return
        happened = {"grad": not self._all_reduced, "param": self._successful}
        for group in self.groups:
            for phase in PHASES:
                observation = group.observation(phase, self.iteration) if happened[phase] else None
                if observation is not None:
                    for observer in self.observers:
                        observer.observe(observation)
        for observer in self.observers:
            observer.finish_iteration(self.iteration, self._successful)

    def _measure_drift(self) -> None:
        if self._drift is None or self.update is None or not self._drift.due(self.iteration):
            return
        with torch.no_grad():
            for ddp in self.chunks:
                for bucket_group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                    self._settle(bucket_group)
            self._drift.measure(self.iteration, self._successful, self._replicas())

    def _replicas(self) -> list[RankReplicas]:
        result = []
        for ddp in self.chunks:
            streams = zip(self._chunks[ddp], buckets_by_stream(ddp), strict=True)
            for group, (_, _, pairs) in streams:
                result.append(RankReplicas(group, pairs[0][0].data_parallel_group, pairs))
        return result

    def skip_iteration(self) -> None:
        """An iteration passed without a step of the optimizer."""
        self.iteration += 1

    def set_iteration(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: all replicas are equal."""
        self.iteration = iteration
        self.update = None
        for observer in self.observers:
            observer.restart(iteration)

    def add_optimizer(self, optimizer: Any) -> None:
        """Note an optimizer; Megatron scales the loss with the first one's gradient scaler."""
        if self._optimizer is None or self._optimizer() is None:
            self._optimizer = weakref.ref(optimizer)

    def loss_scale(self) -> torch.Tensor | None:
        """What the loss is multiplied with, or ``None`` without a gradient scaler."""
        optimizer = self._optimizer() if self._optimizer is not None else None
        scaler = getattr(optimizer, "grad_scaler", None)
        return scaler.scale if scaler is not None else None

    def note_all_reduce(self) -> None:
        """The gradients of this iteration are all-reduced, without loss. Say so once."""
        self._all_reduced = True
        if not self._told_all_reduce and not self.config.phase("grad").lossless:
            self._told_all_reduce = True
            if dist.get_rank() == 0:
                logger.warning(
                    "iteration %d: Megatron all-reduces the gradients of this step, which therefore carries no "
                    "gradient loss (said once)",
                    self.iteration + 1,
                )

    def metrics(self) -> dict[str, float]:
        """What the observers have measured since the last call (docs/monitors.md). A collective call."""
        return metrics_of(self.observers)

    # --- the owners' weights -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def owner_weights(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> Iterator[None]:
        """Within this context the replica of every rank holds the owners' weights; afterwards its own again.

        A collective call for all ranks. ``model_chunks``: what Megatron calls ``model``, wrapped in DDP or not.
        """
        restore = []
        with torch.no_grad():
            for bucket_group in self._bucket_groups(model_chunks):
                self._settle(bucket_group)
                for bucket in bucket_group.buckets:
                    finish = self._gather_reliably(bucket_group, bucket)
                    if finish is not None:
                        restore.append((finish, bucket.param_data))
        try:
            yield
        finally:
            with torch.no_grad():
                for finish, buffer in restore:
                    finish(buffer)

    def _bucket_groups(self, model_chunks: Sequence[torch.nn.Module] | torch.nn.Module) -> list[Any]:
        if self.update is None or self.config.phase("param").lossless:
            return []
        chunks = model_chunks if isinstance(model_chunks, Sequence) else [model_chunks]
        wanted = {id(innermost(chunk)) for chunk in chunks}
        found = [ddp for ddp in self.chunks if id(innermost(ddp)) in wanted]
        if len(found) != len(wanted):
            raise ValueError(f"{len(wanted) - len(found)} of the given model chunks were not wrapped in Megatron's DDP")
        return [group for ddp in found for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups]

    @staticmethod
    def _settle(bucket_group: Any) -> None:
        """Let the parameter gather of the last update happen, if it was left to overlap with the next forward."""
        overlapped = bucket_group.ddp_config.overlap_param_gather
        if overlapped and (not bucket_group.param_gather_dispatched or bucket_group.param_gather_handle is not None):
            bucket_group.start_param_sync(force_sync=True)

    def _gather_reliably(self, bucket_group: Any, bucket: Any) -> Any:
        slot = slot_of(bucket.param_data)
        if slot.group.deliveries["param"].lossless:
            return None
        finish = slot.group.before_all_gather(slot.bucket, bucket.param_data, self.update)
        group = bucket_group.intra_distributed_optimizer_instance_group
        own = bucket.param_data.chunk(group.size())[group.rank()]
        dist.all_gather_into_tensor(bucket.param_data, own, group=group)
        return finish


class Lossy(LossyRuntime):
    """An installed set of hooks; :class:`LossyRuntime` with what a training program calls."""

    def __init__(self, config: LossyConfig, steps: int | None = None) -> None:
        super().__init__(config, steps)
        self.ledger = Ledger("megatron-core")
        self.installed = False

    def save_replicas(self, folder: str) -> None:
        """With ``--save-replicas``: write this rank's stale units and recovery state into ``folder``."""
        save_records(self.observers)
        if self.config.save_replicas and not self.config.lossless:
            save_replicas(self, folder)

    def load_replicas(self, folder: str) -> None:
        """With ``--save-replicas``: restore what :meth:`save_replicas` wrote, after the checkpoint was loaded.

        Raises :class:`UsageError` if it was written by another world size or other loss flags.
        """
        if self.config.save_replicas and not self.config.lossless:
            load_replicas(self, folder)

    def uninstall(self) -> None:
        """Put back everything that was patched. Models that were wrapped meanwhile go on without recovery state."""
        self.ledger.uninstall()
        for observer in self.observers:
            observer.close()
        self.installed = False


def buckets_by_stream(ddp: DistributedDataParallel) -> list[tuple[Stream, Any, list[tuple[Any, Any]]]]:
    """The streams of a model chunk: each with its full group and its (buffer, bucket) pairs in canonical order."""
    result = []
    stage, chunk = pipeline_stage(ddp), model_chunk(ddp)
    for buffers, full, kind, expert in (
        (dense_buffers(ddp), full_group(ddp, expert=False), "dense", 0),
        (ddp.expert_parallel_buffers, full_group(ddp, expert=True), "expert", expert_rank(ddp)),
    ):
        buckets = [(buffer, bucket) for buffer in buffers for bucket in buffer.buckets]
        tied = [pair for pair in buckets if _is_shared_embedding(pair[1])]
        rest = [pair for pair in buckets if not _is_shared_embedding(pair[1])]
        for chosen, stream in ((rest, Stream(kind, expert, stage, chunk)), (tied, Stream("embedding"))):
            if chosen:
                result.append((stream, full, chosen))
    return result


def _is_shared_embedding(bucket: Any) -> bool:
    return any(getattr(param, "shared_embedding", False) for param in bucket.params_list)
