"""Islands of FSDP2 models: each group of ranks that shards a copy of the model is an island (docs/pytorch.md).

A rank averages its shard with the rank of the same place in other islands, after the update and before the next gather. The
exchanges are those of :mod:`.ranks`; here all islands are in one world of torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...base.errors import refuse
from ...config import LossyConfig
from .ranks import ExchangingRank
from .rounds import Rounds
from .vector import Segment, Subset, Vector

if TYPE_CHECKING:
    from ...pytorch.fsdp import LossyFSDP

_made = 0  # runs with islands in this process, of which each has stores of its own


class GroupWorld:
    """The place of this rank in islands of one world of torch. ``groups``: the ranks of each island, in the same order."""

    patience = 600.0

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        global _made
        _made += 1
        self.islands = len(groups)
        self.island = next(number for number, ranks in enumerate(groups) if dist.get_rank() in ranks)
        self.rank = list(groups[self.island]).index(dist.get_rank())
        self._prefix = f"megatron_lossy/pytorch/islands/{_made}/{self.rank}"

    def store(self, name: str) -> Any:
        """Return a store of the ranks with this one's place in every island alone."""
        return dist.PrefixStore(f"{self._prefix}/{name}", dist.distributed_c10d._get_default_store())


class FSDPIslands(ExchangingRank):
    """Islands of FSDP2's ranks. ``islands``: the ranks of each, in the same order."""

    def __init__(self, config: LossyConfig, islands: Sequence[Sequence[int]]) -> None:
        if len(islands) != config.islands:
            raise refuse(
                "--islands", config.islands, f"must be {len(islands)}: so many groups of ranks shard the model"
            )
        super().__init__(config, GroupWorld(islands))
        self._updates = 0  # which the exchanges are keyed by

    def attach(self, run: LossyFSDP) -> None:
        super().attach(run)
        run.job, run.jobs = self.world.island, self.config.islands
        run.events.on(built=self.ready, iteration_ends=self.end_iteration, restart=self.restart)

    def ready(self) -> None:
        """Begin with the weights of now. A collective call of all islands."""
        self._control.total(torch.zeros(1))  # all are there
        _ = self._rounds

    @property
    def _exchanging(self) -> list[Any]:
        """The run, as the only optimizer; none if islands exchange nothing."""
        return [self._run] if self.config.sync_method != "none" else []

    def _build(self, number: int, run: LossyFSDP) -> Rounds:
        config, vector = self.config, self._vector()
        stream = replace(run.stream, kind="islands", expert_rank=self.world.rank)
        subset = Subset(config, vector.size, config.loss_seed, stream)
        crossing = self._crossing(number, subset)
        return Rounds(config, subset, [vector], crossing, run.steps, run.device, self.monitor.used)

    def _vector(self) -> Vector:
        """Return this rank's shards of all parameter groups, one after another."""
        segments, base = [], 0
        for shard in self._run.own_weights():
            segments.append(Segment(base, shard, None))
            base += shard.numel()
        return Vector(segments, base, self._run.device)

    def end_iteration(self) -> None:
        """End an iteration: the update is made, and no weight of it was gathered yet."""
        for rounds in self._rounds:
            self._after(rounds, self._updates)
        self._updates += 1

    def restart(self, iteration: int) -> None:
        """Count updates from ``iteration`` on."""
        self._updates = iteration

    @contextlib.contextmanager
    def consensus_weights(self) -> Iterator[None]:
        run = self._run
        run.settle()
        gathered = run.gathered()
        with torch.no_grad():
            means = [self._control.total(weights) / self.config.islands for _, _, weights in gathered]
        try:
            with self._in_model([(ranks, replica) for ranks, replica, _ in gathered], means), run.opened():
                yield
        finally:
            run.reshard()

    def state_dict(self) -> Any:
        return {"updates": self._updates, "rounds": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["rounds"])
        self._updates = state["updates"]
