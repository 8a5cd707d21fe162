"""Islands of FSDP2 models: each group of ranks that shards a copy of the model is an island (docs/pytorch.md).

A rank averages its shard with the rank of the same place in other islands, after the update and before the next gather. The
exchanges are those of :mod:`.ranks`; here all islands are in one world of torch.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...base.errors import refuse
from ...config import LossyConfig
from .elastic import ElasticIslands
from .ranks import ExchangingRank
from .rounds import Rounds
from .vector import Segment, Subset, Vector
from .world import ElasticWorld

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


class _ShardsOfFSDP(ExchangingRank):
    """The exchanges of a rank's shards of all parameter groups, one after another."""

    _updates = 0  # which the exchanges are keyed by

    def attach(self, run: LossyFSDP) -> None:
        super().attach(run)
        run.job, run.jobs = self.world.island, self.config.islands

    @property
    def _iteration(self) -> int:
        return self._updates

    @property
    def _exchanging(self) -> list[Any]:
        """The run, as the only optimizer; none if islands exchange nothing."""
        return [self._run] if self.config.sync_method != "none" else []

    def _build(self, number: int, run: LossyFSDP) -> Rounds:
        vector = self._vector(run)
        subset = self._subset(vector, number)
        crossing = self._crossing(number, subset)
        return self._make_rounds(self.config, subset, [vector], crossing, run.steps, run.device, self.monitor.used)

    def _subset(self, vector: Vector, number: int) -> Subset:
        stream = replace(self._run.stream, kind="islands", expert_rank=self.world.rank)
        return Subset(self.config, vector.size, self.config.loss_seed, stream)

    def _vector(self, run: LossyFSDP) -> Vector:
        segments, base = [], 0
        for shard in run.own_weights():
            segments.append(Segment(base, shard, None))
            base += shard.numel()
        return Vector(segments, base, run.device)

    @contextlib.contextmanager
    def consensus_weights(self) -> Iterator[bool]:
        run = self._run
        run.settle()
        gathered = run.gathered()
        with torch.no_grad():
            means = self._means([weights for _, _, weights in gathered])
        if means is None:
            with run.owner_weights():
                yield False
            return
        try:
            with self._in_model([(ranks, replica) for ranks, replica, _ in gathered], means), run.opened():
                yield True
        finally:
            run.reshard()

    def state_dict(self) -> Any:
        return {"updates": self._updates, "rounds": super().state_dict()}

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state["rounds"])
        self._updates = state["updates"]


class FSDPIslands(_ShardsOfFSDP):
    """Islands of FSDP2's ranks. ``islands``: the ranks of each, in the same order."""

    def __init__(self, config: LossyConfig, islands: Sequence[Sequence[int]]) -> None:
        if len(islands) != config.islands:
            raise refuse(
                "--islands", config.islands, f"must be {len(islands)}: so many groups of ranks shard the model"
            )
        super().__init__(config, GroupWorld(islands))

    def attach(self, run: LossyFSDP) -> None:
        super().attach(run)
        run.events.on(built=self.ready, iteration_ends=self.end_iteration, restart=self.restart)

    def ready(self) -> None:
        """Begin with the weights of now. A collective call of all islands."""
        self._control.total(torch.zeros(1))  # all are there
        _ = self._rounds

    def end_iteration(self) -> None:
        """End an iteration: the update is made, and no weight of it was gathered yet."""
        for rounds in self._rounds:
            self._after(rounds, self._updates)
        self._updates += 1

    def restart(self, iteration: int) -> None:
        """Count updates from ``iteration`` on."""
        self._updates = iteration


class ElasticFSDPIslands(_ShardsOfFSDP, ElasticIslands):
    """Islands of FSDP2, each a launch of its own. The program calls :meth:`catch_up` before each update, and gets its number."""

    def __init__(self, config: LossyConfig) -> None:
        world = ElasticWorld(config.islands, config.island or 0, config.loss_seed)
        world.rank, world.size = dist.get_rank(), dist.get_world_size()
        super().__init__(config, world)
        self._agreed: Callable[[], int] = int

    def catch_up(self, iteration: int) -> int:
        if self._entered and self._updates < iteration:  # the optimizer has rejected its step
            self.end_iteration()
            self._gather()
        self._agreed()
        if self._replaced:
            self.leave()
        self._updates = now = super().catch_up(iteration)
        if now > iteration:
            self._run.begin_equal()
        self._agreed = self.begin_agreeing(0, now + 1)
        return now

    def end_iteration(self) -> None:
        for number in range(len(self._rounds)):
            self._exchange(number)
        super().end_iteration()
        self._updates += 1

    @property
    def _inner(self) -> list[Any]:
        return self._run.optimizers

    def flags(self) -> dict[str, Any]:
        run, found = self._run, super().flags()
        layout = [json.loads(found["layout"]), run.layout(), type(run.optimizers[0]).__name__, run.steps]
        return found | {"layout": json.dumps(layout)}

    def _gather(self) -> None:
        self._run.weights_changed()
        self._run.reshard()
