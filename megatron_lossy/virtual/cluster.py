"""The virtual cluster: N workers take turns on one model.

An iteration: for each worker, its replica is swapped in and its micro-batches leave a gradient in Megatron's buffer;
what will not arrive is removed from it and the rest added to a sum. Then each owner's rule corrects its shard of the
sum, and the optimizer, which holds all shards, makes one update.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..channel import Exchange, Network, Stream
from ..collectives import BucketSpec, LossyGroup
from ..config import PHASES, LossyConfig
from ..errors import refuse
from ..hooks.ledger import Ledger, Patch
from ..hooks.runtime import buckets_by_stream
from ..monitor import Observation, Observer, make_observers
from .arrivals import Arrivals, WorkerDeliveries
from .grad_norm import by_shards
from .layout import buffers_for
from .versions import Versions

REPLICAS = Path("lossy_replicas") / "virtual.pt"
# Adding in pieces that fit into a core's cache, and clearing each while it is there.
_PIECE = 2**17


class _Group:
    """The buckets of one stream: their losses and rules for every worker, the sum, and the replicas."""

    def __init__(
        self, config: LossyConfig, buckets: list[Any], stream: Stream, workers: int, steps: int | None
    ) -> None:
        nodes = None
        if config.lossy_links == "inter-node":
            nodes = [worker // config.ranks_per_node for worker in range(workers)]
        self.buckets = buckets
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


class VirtualCluster:
    """``workers`` data-parallel workers in this process; takes the place of installed hooks in a training program.

    Build the model within :meth:`building`, then call :meth:`attach`. ``steps``: length of the run, if known, to
    refuse a trace that is too short. Raises :class:`UsageError` where the loss flags do not fit.
    """

    def __init__(self, config: LossyConfig, workers: int, steps: int | None = None) -> None:
        if config.lossy_links == "inter-node" and not config.ranks_per_node:
            raise refuse("--lossy-links", "inter-node", "needs --ranks-per-node with virtual workers")
        self.config = config
        self.workers = workers
        self.steps = steps
        self.iteration = 0
        self.observers: list[Observer] = [] if config.lossless else make_observers(config)
        self._ddp: Any = None
        self._groups: list[_Group] = []
        self._worker: int | None = None
        self._tokens: torch.Tensor | None = None
        self._peak = 1.0
        self._ledger = Ledger("virtual cluster")

    # --- building ------------------------------------------------------------------------------------------------

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Within this context DistributedDataParallel lays its buffers out as N ranks would."""
        return buffers_for(self.workers)

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``, one model chunk of a world of one rank, built in :meth:`building`.

        From here on Megatron neither reduces gradients nor gathers parameters: it calls this cluster where it would
        finish the gradients of a rank.
        """
        self._ddp = ddp
        ddp.ddp_config.overlap_grad_reduce = False  # it has cut the buckets; nothing is sent
        ddp.config.no_sync_func = None
        ddp.config.finalize_model_grads_func = self._collect
        for stream, _, pairs in buckets_by_stream(ddp):
            buckets = [bucket for _, bucket in pairs]
            self._groups.append(_Group(self.config, buckets, stream, self.workers, self.steps))
        self._ledger.install(
            [
                Patch(
                    "megatron.core.optimizer.optimizer:get_grad_norm_fp32",
                    lambda original: by_shards(original, self._gradients, self.workers),
                    "adds up the gradient norm shard by shard, as the ranks do, so that clipping rounds alike",
                    "all",
                    "never: Megatron has one rank here",
                )
            ]
        )

    def _gradients(self) -> list[torch.Tensor]:
        return [bucket.grad_data for group in self._groups for bucket in group.buckets]

    def uninstall(self) -> None:
        """Put back what was patched."""
        if self._ledger.installed:
            self._ledger.uninstall()
        for observer in self.observers:
            observer.close()

    # --- an iteration --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def worker(self, worker: int) -> Iterator[None]:
        """Within this context the model has the replica of ``worker``, and gradients are its own."""
        with torch.no_grad():
            for group in self._groups:
                group.versions.swap_in(worker)
            self._note_peak()
        self._worker = worker
        try:
            yield
        finally:
            self._worker = None
            with torch.no_grad():
                for group in self._groups:
                    group.versions.swap_out()

    def _collect(self, model: Any, num_tokens: torch.Tensor | None = None, **_: Any) -> None:
        """In the place of Megatron's ``finalize_model_grads``, at the end of a worker's last backward pass."""
        assert self._worker is not None, "gradients were computed outside a worker's turn"
        with torch.no_grad():
            for group in self._groups:
                group.collect(self._worker, self.iteration)
        if num_tokens is not None:
            self._tokens = num_tokens.clone() if self._tokens is None else self._tokens + num_tokens

    def step(self, optimizer: Any) -> Any:
        """Reduce the gradients of all workers and make the update; returns what ``optimizer.step()`` does."""
        scale = 1.0 / self.workers
        if self._tokens is not None:
            tokens, self._tokens = self._tokens.item(), None
            scale = 1.0 / tokens if tokens else 1.0
        with torch.no_grad():
            for group in self._groups:
                group.reduce(scale)
                group.versions.before_update(self.iteration, group.lost(self.iteration))
            self._note_peak()
            result = optimizer.step()
            successful = bool(result[0])
            for group in self._groups:
                group.versions.after_update(successful)
                for worker in group.workers:
                    worker.finish_step(self.iteration, successful)
        self._tell_observers(successful)
        self.iteration += 1
        return result

    def _tell_observers(self, successful: bool) -> None:
        if not self.observers:
            return
        for group in self._groups:
            for phase in PHASES if successful else PHASES[:1]:
                observation = group.observation(phase, self.iteration)
                if observation is not None:
                    for observer in self.observers:
                        observer.observe(observation)
        for observer in self.observers:
            observer.finish_iteration(self.iteration, successful)

    # --- what a training program asks ------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """What the observers have measured since the last call."""
        result: dict[str, float] = {}
        for observer in self.observers:
            result |= observer.metrics()
        return result

    @contextlib.contextmanager
    def owner_weights(self, model_chunks: Any) -> Iterator[None]:
        """Within this context the model has the owners' weights: always, outside of a worker's turn."""
        assert self._worker is None
        yield

    @property
    def weight_copies(self) -> float:
        """The most memory that weights have taken so far, in copies of the model, the working one included."""
        return self._peak

    def _note_peak(self) -> None:
        own = sum(bucket.param_data.numel() for group in self._groups for bucket in group.buckets)
        kept = sum(group.versions.kept for group in self._groups)
        self._peak = max(self._peak, (own + kept) / own)

    def set_iteration(self, iteration: int) -> None:
        """A checkpoint of ``iteration`` attempted iterations was loaded: all replicas are equal."""
        self.iteration = iteration
        for group in self._groups:
            group.versions.restart()
        for observer in self.observers:
            observer.restart(iteration)

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """With ``--save-replicas``: write what makes the replicas differ, and the state of the rules."""
        if not self.config.save_replicas or self.config.lossless:
            return
        state = {
            "workers": self.workers,
            "--loss-unit": self.config.loss_unit,
            "--packet-bytes": self.config.packet_bytes if self.config.loss_unit == "packet" else None,
            "--grad-recovery": self.config.grad_recovery,
            "versions": [group.versions.state_dict() for group in self._groups],
            "recovery": [
                [[rule.state_dict() for rule in worker.recoveries] for worker in group.workers]
                for group in self._groups
            ],
        }
        path = Path(folder) / REPLICAS
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """With ``--save-replicas``: restore :meth:`save_replicas`. Raises :class:`UsageError` if it does not fit."""
        if not self.config.save_replicas or self.config.lossless:
            return
        path = Path(folder) / REPLICAS
        if not path.is_file():
            raise refuse(
                "--save-replicas", f"with {folder}", "that checkpoint has no replicas of virtual workers; omit the flag"
            )
        device = self._groups[0].buckets[0].param_data.device
        state = torch.load(path, map_location=device, weights_only=True)
        for name, value in (
            ("workers", self.workers),
            ("--loss-unit", self.config.loss_unit),
            ("--packet-bytes", self.config.packet_bytes if self.config.loss_unit == "packet" else None),
            ("--grad-recovery", self.config.grad_recovery),
        ):
            if state[name] != value:
                raise refuse("--save-replicas", f"with {folder}", f"{name} was {state[name]} there and is {value} here")
        for group, versions, recovery in zip(self._groups, state["versions"], state["recovery"], strict=True):
            group.versions.load_state_dict(versions)
            for worker, rules in zip(group.workers, recovery, strict=True):
                for rule, saved in zip(worker.recoveries, rules, strict=True):
                    rule.load_state_dict(saved, device)
