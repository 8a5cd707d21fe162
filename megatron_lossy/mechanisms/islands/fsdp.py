"""Islands of FSDP2 models: each group of ranks that shards a copy of the model is an island (docs/pytorch.md).

A rank averages its shard with the rank of the same place in other islands, after the update and before the next gather. The
exchanges are those of :mod:`.ranks`; here all islands are in one world of torch.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...base.device import all_gather_single
from ...base.errors import UsageError, refuse
from ...base.exchange import Delivery
from ...base.jobs import JobGroup
from ...config import LossyConfig
from ...run.mechanism import Part
from .between_ranks import RankExchanges, carriers_of
from .form import bytes_sent
from .monitor import IslandMonitor
from .rounds import Rounds
from .vector import Segment, Subset, Vector
from .world import Meeting

if TYPE_CHECKING:
    from ...pytorch.fsdp import LossyFSDP

_PATIENCE = timedelta(minutes=10)
_made = 0  # runs with islands in this process, of which each has stores of its own


class FSDPIslands(Part, JobGroup):
    """The exchanges of this rank with its peers in other islands. ``islands``: the ranks of each, in the same order."""

    name = "islands"

    def __init__(self, config: LossyConfig, islands: Sequence[Sequence[int]]) -> None:
        global _made
        if len(islands) != config.islands:
            raise refuse(
                "--islands", config.islands, f"must be {len(islands)}: so many groups of ranks shard the model"
            )
        _made += 1
        self.config = config
        self.island = next(number for number, ranks in enumerate(islands) if dist.get_rank() in ranks)
        self.place = list(islands[self.island]).index(dist.get_rank())
        self.monitor = IslandMonitor()
        self._prefix = f"megatron_lossy/pytorch/islands/{_made}"
        self._rounds: Rounds[RankExchanges] | None = None
        self._updates = 0  # which the exchanges are keyed by

    def attach(self, run: LossyFSDP) -> None:
        self._run = run
        run.job, run.jobs = self.island, self.config.islands
        run.job_group = self
        if self.config.sync_method != "none":
            run.observers.append(self.monitor)
        run.events.on(built=self.ready, iteration_ends=self.end_iteration, restart=self.restart, close=self.close)

    # --- building --------------------------------------------------------------------------------------------------

    def _store(self, name: str) -> Any:
        """Return a store of the ranks with this one's place in every island alone."""
        store = dist.distributed_c10d._get_default_store()
        return dist.PrefixStore(f"{self._prefix}/{self.place}/{name}", store)

    def _meet(self, name: str) -> Meeting:
        return Meeting(self._store(name), self.island, self.config.islands, _PATIENCE)

    @functools.cached_property
    def _control(self) -> Meeting:
        return self._meet("control")

    def ready(self) -> None:
        """Begin with the weights of now. A collective call of all islands."""
        self._control.total(torch.zeros(1))  # all are there
        if self.config.sync_method != "none":
            self._rounds = self._build()

    def _build(self) -> Rounds[RankExchanges]:
        config, run = self.config, self._run
        vector = self._vector()
        subset = Subset(
            config, vector.size, config.loss_seed, replace(run.stream, kind="islands", expert_rank=self.place)
        )
        patience = _PATIENCE.total_seconds()
        carriers = carriers_of(config, subset.most, self.island, "", self._store, self._meet, patience)
        crossing = RankExchanges(config, subset.stream, self.island, carriers, run.steps, self._tell)
        return Rounds(config, subset, [vector], crossing, run.steps, run.device, self.monitor.used)

    def _vector(self) -> Vector:
        """Return this rank's shards of all parameter groups, one after another."""
        segments, base = [], 0
        for shard in self._run.own_weights():
            segments.append(Segment(base, shard, None))
            base += shard.numel()
        return Vector(segments, base, self._run.device)

    def _tell(self, delivery: Delivery) -> None:
        for observer in self._run.observers:
            observer.observe(delivery)

    @property
    def carriers(self) -> Sequence[Any]:
        return [] if self._rounds is None or not self.config.observed else self._rounds.crossing.carriers

    # --- an iteration ----------------------------------------------------------------------------------------------

    def end_iteration(self) -> None:
        """End an iteration: the update is made, and no weight of it was gathered yet."""
        count = None if self._rounds is None else self._rounds.after_iteration(self._updates)
        self._updates += 1
        if count is not None:
            self.monitor.exchanged(bytes_sent(self.config, count))

    def restart(self, iteration: int) -> None:
        """Count updates from ``iteration`` on."""
        self._updates = iteration

    # --- weights and state -----------------------------------------------------------------------------------------

    def consensus_weights(self) -> contextlib.AbstractContextManager[None]:
        return self._consensus()

    @contextlib.contextmanager
    def _consensus(self) -> Iterator[None]:
        run = self._run
        run.settle()
        kept = [replica.clone() for _, replica, _ in run.gathered()]
        with torch.no_grad():
            for ranks, replica, weights in run.gathered():
                mean = self._control.total(weights) / self.config.islands
                all_gather_single(replica, mean.to(replica.device, replica.dtype), group=ranks)
        try:
            with run.opened():
                yield
        finally:
            with torch.no_grad():
                for (_, replica, _), values in zip(run.gathered(), kept, strict=True):
                    replica.copy_(values)
            run.reshard()

    def identity(self) -> dict[str, Any]:
        return {"islands": self.config.islands, "island": self.island}

    def state_dict(self) -> Any:
        """Return the state of the rule, and of the exchanges under way. Waits for these."""
        if self._rounds is None:
            return None
        return {"updates": self._updates, "rounds": self._rounds.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        if self._rounds is None:
            raise UsageError(f"--sync-method {self.config.sync_method}: the saved state has other exchanges")
        self._updates = state["updates"]
        self._rounds.load_state_dict(state["rounds"])

    def close(self) -> None:
        """End the exchanges."""
        if self._rounds is not None:
            self._rounds.crossing.close()
