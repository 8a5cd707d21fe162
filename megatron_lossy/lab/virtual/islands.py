"""Islands in one process: each a virtual cluster with an optimizer of its own; they take turns on one model.

An iteration: each island in its turn has its weights in the model, computes with its own data, and makes its update.
Then the exchanges between them (:mod:`.rounds`) read and write the weights of all. Losses within an island
are drawn by its workers' ranks among those of all islands, so that no two islands lose the same.

Its twin is :mod:`.ranks`: there Megatron's one optimizer calls the exchange, and each island is a job with checkpoints of
its own; here the run calls M optimizers in turn. :class:`.rounds.Rounds` makes the exchanges of both.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...base.errors import refuse
from ...base.exchange import Delivery, Stream
from ...base.files import naming
from ...base.jobs import JobGroup
from ...config import LossyConfig
from ...hooks.buckets import bucket_sizes
from ...hooks.rng import on_cpu, rng_state, set_rng_state
from ...hooks.versions import optimizers as inner_optimizers
from ...mechanisms.islands.flags import CONSENSUS_FOLDER
from ...mechanisms.islands.mean import bytes_sent
from ...mechanisms.islands.monitor import IslandMonitor
from ...mechanisms.islands.rounds import Rounds
from ...mechanisms.islands.vector import Subset, shard_vector
from ...run.base import ModelChunks, Run
from ...run.monitor import load_states, states_of
from ...transport import LossyGroup
from .cluster import VirtualCluster, buffers_for
from .island_mean import InMemory

#: The file of the islands in a checkpoint.
ISLANDS = "lossy_islands.pt"
#: The random states that training draws from, among those of the process in a checkpoint.
RANDOM = ("torch", "tracker", "device")
_FORMAT = 1


class VirtualIslands(Run, JobGroup):
    """``config.islands`` islands with ``workers`` workers altogether, in the place of :class:`VirtualCluster`.

    Build the model within :meth:`building`, call :meth:`attach`, then :meth:`start`. ``steps``: iterations of the
    slowest island. ``seed``: for the exchanges. Raises :class:`UsageError` if the flags do not fit.
    """

    kind = "virtual"

    def __init__(self, config: LossyConfig, workers: int, steps: int, seed: int, gapless: bool = False) -> None:
        self.clusters: list[VirtualCluster] = []
        super().__init__(config, steps, gapless)
        self.job_group = self
        self.workers, self.local = workers, range(workers)
        size = workers // config.islands
        for island in range(config.islands):
            members = range(island * size, (island + 1) * size)
            local = config.local_iterations(island, steps)
            self.clusters.append(VirtualCluster(config, size, local, gapless, members, workers, island))
        self._steps, self._seed = steps, seed
        self._monitor = IslandMonitor(self._spread)
        self.observers = [self._monitor]
        self._kept: list[list[torch.Tensor]] = []  # by island, the parameters of each bucket
        self._rounds: list[Rounds] = []  # by shard of the weights
        self._random: dict[int, dict[str, Any]] = {}

    def building(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which DistributedDataParallel lays its buffers out as the ranks of an island would."""
        return buffers_for(self.clusters[0].workers)

    def attach(self, ddp: Any) -> None:
        """Take over the gradients of ``ddp``; see :meth:`VirtualCluster.attach`."""
        for cluster in self.clusters:
            cluster.attach(ddp)
            for stream, first in zip(cluster.streams, self.clusters[0].streams, strict=True):
                stream.share_sums(first)
        self._transformer = ddp.config

    def start(self, optimizers: Sequence[Any], schedulers: Sequence[Any]) -> None:
        """Start every island from the weights in the model. ``optimizers``, ``schedulers``: Megatron's, by island."""
        self._optimizers, self._schedulers = list(optimizers), list(schedulers)
        self._kept = [[bucket.param_data.clone() for bucket in self._buckets] for _ in self.clusters]
        shards, states = self.clusters[0].workers, list(zip(map(inner_optimizers, optimizers), self._kept, strict=True))
        for shard in range(shards if self.config.sync_method != "none" else 0):
            vectors = [shard_vector(inner, self._buckets, kept, shard, shards) for inner, kept in states]
            stream = Stream("islands", expert_rank=shard)
            subset = Subset(self.config, vectors[0].size, self._seed, stream)
            crossing = InMemory(self.config, stream, self._steps)
            self._rounds.append(self._make_rounds(self.config, subset, vectors, crossing, self._steps, self.device))

    @property
    def _buckets(self) -> list[Any]:
        return [bucket for stream in self.clusters[0].streams for bucket in stream.buckets]

    @property
    def present(self) -> Sequence[int]:
        """The islands that make the next iteration."""
        return range(len(self.clusters))

    @property
    def senders(self) -> Sequence[int]:
        """The islands that the mean is of."""
        return range(len(self.clusters))

    def _make_rounds(self, *arguments: Any) -> Rounds:
        return Rounds(*arguments)

    @contextlib.contextmanager
    def turn(self, island: int, keep: bool = True) -> Iterator[VirtualCluster]:
        """Return a context in which the model has the owners' weights of ``island``. ``keep``: keep changes."""
        cluster, kept = self.clusters[island], self._kept[island]
        with torch.no_grad():
            for bucket, weights in zip(self._buckets, kept, strict=True):
                bucket.param_data.copy_(weights)
        cluster.take_gradients()
        self._transformer.grad_scale_func = self._optimizers[island].scale_loss
        yield cluster
        if keep:
            with torch.no_grad():
                for bucket, weights in zip(self._buckets, kept, strict=True):
                    weights.copy_(bucket.param_data)

    @contextlib.contextmanager
    def random_state(self, island: int, draws: bool) -> Iterator[None]:
        """Return a context in which random numbers are those of ``island``, if it ``draws`` any; all begin alike."""
        if draws:
            before = rng_state()
            set_rng_state(before | self._random.get(island, {}))
        yield
        if draws:
            self._random[island] = {name: value for name, value in rng_state().items() if name in RANDOM}
            set_rng_state(before)

    @torch.no_grad()
    def exchange(self, successful: Mapping[int, bool]) -> None:
        """Let islands exchange after the updates of this iteration.

        ``successful``: by island that made the iteration, whether it updated.
        """
        self._exchange()
        for island, cluster in enumerate(self.clusters):
            cluster.finish_iteration(successful.get(island, False), all_reduced=island not in successful)
        self.iteration += 1

    def _exchange(self, among: tuple[int, int] | None = None) -> None:
        """Exchange ``among`` islands: see :func:`.bytes_sent`."""
        for rounds in self._rounds:
            if (count := rounds.after_iteration(self.iteration)) is not None:
                self._monitor.exchanged(bytes_sent(self.config, count, among))
                for delivery in rounds.crossing.deliveries:
                    self._monitor.observe(delivery)
                    self._report(delivery)

    def _report(self, delivery: Delivery) -> None:
        for row, island in enumerate(delivery.receivers):
            own = replace(delivery, receivers=[island], arrived=delivery.arrived[row : row + 1])
            for observer in self.clusters[island].observers:
                observer.observe(own)

    @contextlib.contextmanager
    def exchanged_weights(self, model_chunks: ModelChunks) -> Iterator[None]:
        """Return a context in which the model has the weights of the first island, which a checkpoint holds."""
        with self.turn(0, keep=False):
            yield

    @contextlib.contextmanager
    def consensus_weights(self, model_chunks: ModelChunks | None = None) -> Iterator[None]:
        """Return a context in which the model has the mean of the islands' owners' weights, reliably."""
        with torch.no_grad():
            for number, bucket in enumerate(self._buckets):
                first, *others = [self._kept[island][number] for island in self.senders]
                total = first.float()
                for kept in others:
                    total = total + kept
                bucket.param_data.copy_(total / len(self.senders))
        yield

    @torch.no_grad()
    def _spread(self) -> dict[str, float]:
        """Return the mean squared distance of islands to their mean, per element: weights, and ``ema``'s memory."""
        kept = [self._kept[island] for island in self.senders]
        size = sum(weights.numel() for weights in kept[0])
        squares = sum(_squares([island[number] for island in kept]) for number in range(len(kept[0])))
        result = {"sync deviation": squares / (size * len(kept))}
        progress = [rounds.rule.state_dict().get("progress") for rounds in self._rounds]
        if progress and progress[0] is not None:
            rows = [[shard[island] for island in self.senders] for shard in progress]
            result["sync progress spread"] = sum(map(_squares, rows)) / (size * len(kept))
        return result

    def saved_beside(self, folder: str) -> tuple[str, bool] | None:
        return (os.path.join(folder, CONSENSUS_FOLDER), True) if self.config.save_consensus else None

    @property
    def groups(self) -> list[LossyGroup]:
        return [group for cluster in self.clusters for group in cluster.groups]

    @property
    def streams(self) -> list[Any]:
        return []  # each island has observers of its own

    @property
    def device(self) -> torch.device:
        return self.clusters[0].device

    def set_iteration(self, iteration: int) -> None:
        super().set_iteration(iteration)
        for island, cluster in enumerate(self.clusters):
            cluster.set_iteration(self.config.local_iterations(island, iteration))
        for kept, bucket in zip(self._kept[0], self._buckets, strict=True):
            kept.copy_(bucket.param_data)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the islands, on average (or the largest or smallest), and those between them."""
        found = [cluster.metrics() for cluster in self.clusters]
        islands = [found[island] for island in self.present]
        result = {}
        for name in islands[0]:
            pick = {"max": max, "min": min}.get(name.rpartition(" ")[2])
            values = [island[name] for island in islands if name in island]
            result[name] = pick(values) if pick else sum(values) / len(values)
        own = self._monitor.metrics()
        return result | (own if self._rounds else {"sync deviation": own["sync deviation"]})

    def uninstall(self) -> None:
        for cluster in self.clusters:
            cluster.uninstall()

    def identity(self) -> dict[str, Any]:
        sizes = bucket_sizes([(stream.stream, stream.pairs) for stream in self.clusters[0].streams])
        return {"workers": self.workers, "islands": len(self.clusters), **sizes}

    def replica_file(self) -> str:
        return "virtual.pt"

    def exchanged_state(self) -> list[dict[str, Any]]:
        states = []
        for cluster in self.clusters:
            own = {"iteration": cluster.iteration, "update": cluster.update, **cluster.replica_state()}
            states.append({**own, "observers": states_of(cluster.observers)})
        return states

    def load_exchanged_state(self, state: list[dict[str, Any]]) -> None:
        for cluster, saved in zip(self.clusters, state, strict=True):
            cluster.iteration, cluster.update = saved["iteration"], saved["update"]
            cluster.load_replica_state(saved)
            load_states(cluster.observers, saved["observers"])

    def save_replicas(self, folder: str | os.PathLike) -> None:
        """Write all islands' states and the exchanges under way; with ``--save-replicas`` also that of :class:`Run`."""
        for cluster in self.clusters:
            for observer in cluster.observers:
                observer.save()
        islands = [self._state_of(island) for island in range(len(self.clusters))]
        rounds = [of_shard.state_dict() for of_shard in self._rounds]
        state = {"identity": self.identity(), "islands": islands, "rounds": rounds, "random": self._random}
        path = Path(folder, ISLANDS)
        with naming(path), open(path, "wb") as file:  # given a path, torch would write its name into the file
            torch.save({"format": _FORMAT, **state, **self._more_state()}, file)
        super().save_replicas(folder)

    def _state_of(self, island: int) -> dict[str, Any]:
        optimizers = inner_optimizers(self._optimizers[island])
        return {
            "weights": list(self._kept[island]),
            "main": [weights.detach() for weights in _main(optimizers)],
            "optimizers": [optimizer.optimizer.state_dict() for optimizer in optimizers],
            "scheduler": self._schedulers[island].state_dict(),
        }

    def _load_island(self, island: int, state: dict[str, Any]) -> None:
        """Restore :meth:`_state_of`."""
        optimizers, scheduler = inner_optimizers(self._optimizers[island]), self._schedulers[island]
        with torch.no_grad():
            for weights, saved in zip(self._kept[island], state["weights"], strict=True):
                weights.copy_(saved)
            for weights, saved in zip(_main(optimizers), state["main"], strict=True):
                weights.copy_(saved)
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.optimizer.load_state_dict(saved)
        scheduler.num_steps = 0  # Megatron adds the loaded number to it
        scheduler.load_state_dict(state["scheduler"])

    def _take_state(self, island: int, state: dict[str, Any]) -> None:
        """Let ``island`` have weights as those of ``state``, of another one or of before, and what an optimizer keeps of them.

        Its learning rate follows the run.
        """
        own = copy.deepcopy(state)  # an optimizer may keep the very tensors that it loads
        own["scheduler"] = self._schedulers[island].state_dict()
        self._load_island(island, own)

    def load_replicas(self, folder: str | os.PathLike) -> None:
        """Restore the state of :meth:`save_replicas`. Raise :class:`UsageError` for the checkpoint of another run."""
        path, islands = Path(folder, ISLANDS), len(self.clusters)
        if not path.is_file():
            raise refuse("--islands", islands, f"the checkpoint {Path(folder)} is of no islands")
        saved = torch.load(path, map_location=self.device, weights_only=True)
        if (there := saved["format"]) > _FORMAT:
            raise refuse("--islands", islands, f"{path} has format {there}; this version reads up to {_FORMAT}")
        for name, here in self.identity().items():
            if (there := saved["identity"].get(name)) != here:
                raise refuse("--islands", f"with {Path(folder)}", f"{name} was {there} there and is {here} here")
        if len(saved["rounds"]) != len(self._rounds):
            raise refuse("--sync-method", self.config.sync_method, f"exchanges were others in {Path(folder)}")
        for island, state in enumerate(saved["islands"]):
            self._load_island(island, state)
        for rounds, state in zip(self._rounds, saved["rounds"], strict=True):
            rounds.load_state_dict(state)
        self._random = {island: on_cpu(random) for island, random in saved["random"].items()}
        self._load_more(saved)
        super().load_replicas(folder)

    def _more_state(self) -> dict[str, Any]:
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`_more_state`, found in ``state``."""


def _squares(vectors: Sequence[torch.Tensor]) -> float:
    """Return the sum of squared distances of ``vectors`` to their mean; exactly 0 for equal ones, despite rounding."""
    first = vectors[0].float()
    apart = torch.stack([vector.float() - first for vector in vectors])
    return float((apart - apart.mean(dim=0)).square().sum())


def _main(optimizers: Sequence[Any]) -> list[torch.Tensor]:
    """Return the float32 weights that are not the model's own."""
    groups = (group for optimizer in optimizers for group in optimizer.shard_fp32_from_float16_groups)
    return [main for group in groups for main in group if main is not None]
