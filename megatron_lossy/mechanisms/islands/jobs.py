"""Islands as jobs of one run, before it begins: the ranks of each, files and flags that they share, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...base.jobs import Jobs, World


@dataclass(frozen=True)
class IslandJobs(Jobs):
    """The islands of a run with the flags ``config``; one job without any."""

    name: str = "island"
    config: Any = field(default=None, repr=False)

    def world(self, seed: int) -> World | None:
        if not self.config.averages:
            return None
        if self.apart:
            from .world import ElasticWorld

            return ElasticWorld(self.number, self.config.island or 0, seed)
        from .world import IslandWorld

        return IslandWorld(self.number, seed)

    def check(self, train_iters: int | None) -> None:
        config = self.config
        if config.averages and config.sync_method != "none":
            from .mean import check_between

            check_between(config, train_iters)
        if config.averages and config.island_schedule is not None:
            from .schedule import read_schedule

            read_schedule(config.island_schedule, config.islands, train_iters)

    def advice(self, iterations: int | None) -> list[str]:
        from .advice import advice

        return advice(self.config, iterations)
