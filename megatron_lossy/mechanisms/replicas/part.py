"""The full replica of a real rank."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

from ...config.facts import Facts
from ...config.refusal import check_refusals
from ...hooks.complete import warn_of_one_replica
from ...hooks.facts import of_model
from ...hooks.seam import all_reduce
from ...ledger import Patch
from ...mechanism import Part
from ...transport import LossyGroup
from . import lossy_all_reduce
from .ranks import RankReplica


class FullReplica(Part):
    """The full replica of a rank: model chunks whose optimizer is not distributed."""

    name = "replicas"

    def attach(self, run: Any) -> None:
        self._run = run
        self.replica = RankReplica(run.config, run.corruption, run.living_optimizers, run.loss_scale)

    @property
    def there(self) -> bool:
        """Whether the model has full replicas."""
        return bool(self.replica.streams)

    def patches(self) -> list[Patch]:
        config = self._run.config
        return (
            [lossy_all_reduce.patch(self._run)]
            if config.needs_whole_optimizers() and not config.untouched("grad")
            else []
        )

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
