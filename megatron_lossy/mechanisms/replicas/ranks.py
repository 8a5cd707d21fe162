"""The full replica of a real rank: data parallelism without the distributed optimizer.

The gradients of a bucket are all-reduced within a coalescing context, which :mod:`megatron_lossy.hooks.seam` surrounds.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ...config.facts import Facts
from ...hooks.versions import main_gradients
from ...transport.peers import Peers, RankPeers
from .flags import ReplicaFlags
from .held import HeldReplicas
from .repair import Buckets
from .streams import Mains, ReplicaStream, streams_of
from .synchroniser import Tensors

logger = logging.getLogger(__name__)


class RankReplica(HeldReplicas):
    """The full replica of this rank: model chunks whose optimizer is not distributed."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[int, tuple[int, int]] = {}  # of a bucket, by its id: its stream and its number there

    def attach(self, run: Any) -> None:
        super().attach(run)
        run.events.on(chunk_added=self.add_model_chunk, iteration_begins=self.begin_iteration)
        run.events.on(optimizer_added=self.check_optimizer)

    def add_model_chunk(self, ddp: Any) -> None:
        """Register the buckets of ``ddp``, if its optimizer is not distributed."""
        if ddp.ddp_config.use_distributed_optimizer:
            return
        run, known = self._run, len(self.streams)
        run.around_all_reduce = self._before_reduction, self._after_reduction
        self.add(streams_of(ddp))
        for number, stream in enumerate(self.streams[known:], known):
            self._places |= {id(bucket): (number, k) for k, bucket in enumerate(stream.buckets)}
        replicas = self.peers[known].size
        run.add_facts(Facts(workers=replicas))
        if not known:
            warn_of_one_replica(run.config, replicas)

    def check_optimizer(self, optimizer: Any) -> None:
        """Raise :class:`UsageError` if the loss scale of ``optimizer`` cannot go with replicas."""
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None and self.there:
            self._run.add_facts(Facts(loss_scale=scaler.scale.item()))

    def _before_reduction(self, bucket_group: Any) -> None:
        """Note the lengths of the gradients, which Megatron has scaled; the lengths are free of the scale."""
        for bucket in bucket_group.buckets if self.wants_gradient else ():
            local = bucket.grad_data / (bucket.gradient_scaling_factor * self.unit())
            stream, number = self._places[id(bucket)]
            # Squared in float32, where they are: reading a number would wait for the device. Virtual replicas square in
            # float64, and differ in the last bits.
            self.note(stream, 0, number, torch.linalg.vector_norm(local, dtype=torch.float32) ** 2)

    def _after_reduction(self, bucket_group: Any) -> None:
        with torch.no_grad():
            for bucket in bucket_group.buckets:
                stream, number = self._places[id(bucket)]
                self.hit(stream, 0, number, bucket.grad_data)

    def peers_of(self, stream: ReplicaStream) -> Peers:
        return RankPeers(stream.group, stream.buckets[0].grad_data.device)

    def gradients(self, stream: int) -> Buckets:
        """Return the tensors that the optimizer reads of each bucket: from megatron-core 0.17 on not only the buffer.

        Parameters whose micro-batches are added up in float32 have a gradient of their own. Megatron copies the reduced
        gradient into it, and adds up the gradients of tied embeddings there.
        """
        return [[[bucket.grad_data, *main_gradients(bucket)] for bucket in self.streams[stream].buckets]]

    def models(self, mains: Mains) -> Sequence[Tensors]:
        aside = [model for model, (main, _) in mains.items() if model is not main]
        return [lambda: [parameter.data for parameter in aside]]


def warn_of_one_replica(config: ReplicaFlags, replicas: int) -> None:
    """Say, on the first rank, that averages or comparisons do nothing if a stream has one replica."""
    if replicas == 1 and (config.synchronises or config.replica_check != "none") and dist.get_rank() == 0:
        what = "--param-sync-interval" if config.synchronises else "--replica-check"
        logger.warning("%s does nothing: there is one data-parallel rank", what)
