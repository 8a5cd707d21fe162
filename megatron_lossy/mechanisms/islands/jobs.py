"""Islands as jobs of one run, before it begins: the ranks of each, files and flags that they share, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...base.jobs import Jobs, World
from .flags import IslandFlags

#: A moving average of an element settles in this many exchanges.
_SETTLES = 10


@dataclass(frozen=True)
class IslandJobs(Jobs):
    """The islands of a run with the flags ``config``; one job without any. Notes are about flags that are rarely wanted."""

    name: str = "island"
    config: Any = field(default=None, repr=False)

    @property
    def parts(self) -> int:
        return 1 if self.config.sync_ranks is None else self.number

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
            from ...base.exchange import Stream
            from .mean import networks_between

            networks_between(config, Stream("islands"), train_iters)

    def advice(self, iterations: int | None) -> list[str]:
        config, notes = self.config, []
        if not config.averages or config.sync_method != "parameters":
            return notes
        if config.overlap and config.correction != "smith":
            smaller = 1 / (config.rounds_under_way + 1)
            notes.append(
                f"{under_way(config)}; with --sync-fraction of at most {smaller:.3g} there is none, and --delay-correction smith "
                "allows for them"
            )
        visits = None if iterations is None else iterations // (config.parts * config.sync_interval)
        if config.correction == "ema" and visits is not None and visits < _SETTLES:
            notes.append(
                f"--delay-correction ema: an element is exchanged {visits} times in this run; its average never settles"
            )
        return notes


def under_way(config: IslandFlags) -> str:
    """Return in words the exchanges of an element that are under way at once."""
    if config.sync_subset == "bernoulli":
        many, subset = (
            f"{config.mean_overlap:.3g} later exchanges of an element on average",
            " and --sync-subset bernoulli",
        )
    else:
        many = f"{config.overlap} later exchanges of an element"
        subset = " and --sync-subset partition" if config.sync_subset == "partition" else ""
    return f"{many} under way (--sync-delay {config.sync_delay}){subset}"
