"""The buckets of one stream, as all virtual workers exchange them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..config import PHASES, LossyConfig
from ..exchange import Exchange, Observation, Stream
from ..transport import BucketSpec, LossyGroup, Network
from .arrivals import Arrivals, WorkerDeliveries
from .versions import Versions

# Adding in pieces that fit into a core's cache, and clearing each while it is there.
_PIECE = 2**17


class Group:
    """The buckets of one stream: their losses and rules for every worker, the sum, and the replicas."""

    def __init__(
        self, config: LossyConfig, pairs: list[Any], stream: Stream, workers: int, steps: int | None
    ) -> None:
        nodes = None
        if config.lossy_links == "inter-node":
            nodes = [worker // config.ranks_per_node for worker in range(workers)]
        self.pairs = pairs
        self.buckets = buckets = [bucket for _, bucket in pairs]
        self.stream = stream
        self.arrivals: dict[str, Arrivals] = {}

        def deliveries(network: Network, stream: Stream, members: Any, rank: int, units: int) -> WorkerDeliveries:
            phase = network.phase
            if phase not in self.arrivals:
                self.arrivals[phase] = Arrivals(network, stream, workers, units)
            return WorkerDeliveries(self.arrivals[phase], network, stream, members, rank, units)

        specs = [
            BucketSpec(bucket.grad_data.numel() // workers, bucket.grad_data.dtype, bucket.param_data.dtype)
            for bucket in buckets
        ]
        networks = {phase: Network(config, phase, workers, nodes) for phase in PHASES}
        self.workers = [
            LossyGroup(config, specs, networks, range(workers), rank, stream, steps, deliveries)
            for rank in range(workers)
        ]
        self.units = self.workers[0].units
        self.lossless = {phase: self.workers[0].deliveries[phase].lossless for phase in PHASES}
        self.sums = [torch.empty_like(bucket.grad_data) for bucket in buckets]
        self.finishes: list[list[Any]] = []
        self.versions = Versions(
            [bucket.param_data for bucket in buckets], self.units["param"], self.arrivals["param"].units, workers
        )

    def collect(self, worker: int, step: int) -> None:
        """Take the gradient of ``worker`` out of Megatron's buffers, which are zero afterwards."""
        finishes = []
        for number, (bucket, total) in enumerate(zip(self.buckets, self.sums, strict=True)):
            finishes.append(self.workers[worker].before_reduce_scatter(number, bucket.grad_data, step))
            _move(bucket.grad_data, total, add=bool(self.finishes))
        self.finishes.append(finishes)

    def reduce(self, scale: float) -> None:
        """Let every owner correct its shard of the sum, and put ``scale`` times the result into Megatron's buffers."""
        for worker, finishes in enumerate(self.finishes):
            for finish, cut, total in zip(finishes, self.units["grad"], self.sums, strict=True):
                if finish is not None:
                    finish(total[worker * cut.shard : (worker + 1) * cut.shard])
        self.finishes = []
        for bucket, total in zip(self.buckets, self.sums, strict=True):
            torch.mul(total, scale, out=bucket.grad_data)

    def lost(self, step: int) -> np.ndarray:
        """bool[N receivers, N sources, units]: what the update of ``step`` does not bring."""
        arrivals = self.arrivals["param"]
        if self.lossless["param"]:
            return np.zeros((arrivals.size, arrivals.size, arrivals.units), dtype=bool)
        return ~arrivals.at(step)

    def observation(self, phase: str, step: int) -> Observation | None:
        """All deliveries of ``step``; ``None`` in a phase without loss."""
        if self.lossless[phase]:
            return None
        everyone = range(len(self.workers))
        arrived = self.arrivals[phase].at(step)
        return Observation(Exchange(phase, self.stream, step), everyone, everyone, arrived, self.units[phase])


def _move(source: torch.Tensor, target: torch.Tensor, add: bool) -> None:
    pieces = 1 if source.device.type != "cpu" else max(1, source.numel() // _PIECE)
    for part, into in zip(source.chunk(pieces), target.chunk(pieces), strict=True):
        if add:
            into.add_(part)
        else:
            into.copy_(part)
        part.zero_()
