"""The mechanisms of a real rank: chosen by the flags, and hooked to Megatron."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from functools import partial
from typing import Any

from ..config import LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..ledger import Patch
from ..mechanism import Mechanism
from ..mechanisms.boundaries import hooks as boundaries
from ..mechanisms.islands import megatron_training as island_training
from ..mechanisms.islands.ranks import RankIslands
from ..mechanisms.islands.world import IslandWorld
from ..mechanisms.replicas import lossy_all_reduce
from ..mechanisms.replicas.ranks import RankReplica
from ..transport import LossyGroup
from .complete import warn_of_one_replica, warn_of_reliable_boundaries
from .facts import of_model
from .seam import all_reduce
from .versions import data_parallel_rank


def attached(config: LossyConfig, world: IslandWorld | None = None) -> list[Mechanism]:
    """The mechanisms that ``config`` asks for. ``world``: the launched world as this rank's job sees it."""
    if config.inert:
        return []
    result: list[Mechanism] = [FullReplica()]
    if config.loses_at_boundaries:
        result.append(StageBoundaries())
    if world is not None:
        result.append(TrainingIslands(config, world))
    return result


class TrainingIslands(RankIslands):
    """Islands that may run under ``megatron.training``."""

    def training_patches(self) -> list[Patch]:
        return island_training.patches(self)

    def before_arguments(self, args: Any) -> None:
        island_training.before_validation(self, args)

    def after_arguments(self, args: Any) -> None:
        island_training.enter(self, args)

    def save_beside(self, args: Any) -> contextlib.AbstractContextManager[bool] | None:
        return island_training.consensus_saved(self, args) if self._config.save_consensus else None


class StageBoundaries(Mechanism):
    """Boundaries between pipeline stages that lose messages (``--p-act``, ``--p-act-grad``, ``--act-transport``)."""

    section = "boundaries"

    def attach(self, run: Any) -> None:
        self._run = run
        self.boundaries = boundaries.Boundaries(run, run.exchanges.on_one_node)

    def patches(self) -> list[Patch]:
        if self._run.config.act_transport == "torch":
            return boundaries.patches(self.boundaries)
        from ..mechanisms.boundaries import datagrams

        return boundaries.patches(self.boundaries, datagrams.p2p_ops)

    def meet(self, ddp: Any) -> None:
        # Over all ranks, so before anything that only some of them have.
        if self._run.exchanges.find_nodes():
            warn_of_reliable_boundaries(self._run.exchanges.nodes)
        if self._run.config.act_transport == "udp" and self.boundaries.links is None:
            from ..mechanisms.boundaries.links import StageLinks

            self.boundaries.links = StageLinks(self._run.config)

    def add_model_chunk(self, ddp: Any) -> None:
        if self._run.config.virtual_boundaries is not None:
            self.boundaries.attach(ddp, functools.partial(data_parallel_rank, ddp))

    @property
    def carriers(self) -> Sequence[Any]:
        return [] if self.boundaries.links is None else self.boundaries.links.all

    def close(self) -> None:
        if self.boundaries.links is not None:
            self.boundaries.links.close()


class FullReplica(Mechanism):
    """The full replica of a rank: model chunks whose optimizer is not distributed."""

    section = "replicas"

    def attach(self, run: Any) -> None:
        self._run = run
        self.replica = RankReplica(run.config, run.corruption, run.living_optimizers, run.loss_scale)

    @property
    def there(self) -> bool:
        """Whether the model has full replicas."""
        return bool(self.replica.streams)

    def patches(self) -> list[Patch]:
        config = self._run.config
        return [lossy_all_reduce.patch(self._run)] if config.replicates and not config.untouched("grad") else []

    def take_over(self, ddp: Any) -> list[LossyGroup] | None:
        if ddp.ddp_config.use_distributed_optimizer:
            return None
        run, known = self._run, len(self.replica.streams)
        if not known:
            run.after_update.append(lambda _: self.replica.finished())
            self.reducing = self._reducing
        self.replica.add(ddp)
        replicas = self.replica.streams[known].group.size()
        check_refusals(run.config, of_model(ddp, workers=replicas))
        if not known:
            warn_of_one_replica(run.config, replicas)
        lossy = [] if run.config.untouched("grad") else self.replica.streams[known:]
        return [run.exchanges.of_replica(one, run.steps) for one in lossy]

    def add_optimizer(self, optimizer: Any) -> None:
        scaler = getattr(optimizer, "grad_scaler", None)
        if scaler is not None and self.there:
            check_refusals(self._run.config, Facts(distributed_optimizer=False, loss_scale=scaler.scale.item()))

    def _reducing(self, bucket_group: Any) -> contextlib.AbstractContextManager[None]:
        return all_reduce(
            partial(self.replica.before_reduction, bucket_group),
            lambda: self.replica.after_reduction(bucket_group, self._run.iteration),
        )

    def begin_iteration(self) -> None:
        if self.there:
            self.replica.together.check()

    def begin_update(self) -> None:
        if self.there:
            self.replica.arrive()

    def happened(self, iteration: int) -> list[Any]:
        return self.replica.take(iteration) if self.there else []

    def owner_weights(self) -> contextlib.AbstractContextManager[None] | None:
        return self.replica.together.averaged() if self.there else None

    def replica_state(self) -> Any:
        return self.replica.together.state_dict() if self.there else None

    def load_replica_state(self, state: Any) -> bool:
        if self.there:
            self.replica.together.load_state_dict(state)
        return self.there

    def restart(self, iteration: int) -> None:
        if self.there:
            self.replica.together.restart()
