"""Islands: complete training jobs that exchange some of their parameters, late (AsyncMesh, section 4; docs/islands.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ...base.jobs import Jobs, World
from ...run.mechanism import Mechanism
from .flags import IslandFlags

#: A moving average of an element settles in this many exchanges.
_SETTLES = 10


class Islands(Mechanism):
    """The place of islands among the mechanisms."""

    name = "islands"
    Flags = IslandFlags
    table = "megatron_lossy.mechanisms.islands.refusals:ISLANDS"
    phases: ClassVar[Mapping[str, int]] = {"sync-reduce": 4, "sync-gather": 5}
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {
        "loss rate sync-reduce": ("share of units lost on the way to an owner of means", False),
        "loss rate sync-gather": ("share of means lost on the way back", False),
        "sync bytes": ("bytes that a rank sends in an exchange between islands", False),
        "sync wait": ("seconds that a rank waited for other islands, for each mean", False),
        "island members": ("islands in an exchange", False),
        "island senders": ("islands that sent in an exchange", False),
        "exchanges lost": ("share of exchanges of which nothing arrived", False),
        "sync deviation": ("mean squared distance of an island to the mean (weight²)", True),
        "sync progress spread": ("mean squared distance of the remembered progress to its mean (weight²)", True),
    }

    @classmethod
    def attach(cls, run: Any) -> None:
        if run.kind == "FSDP2" and run.islands is not None and run.config.averages:
            from .fsdp import ElasticFSDPIslands, FSDPIslands

            apart, config = run.config.rendezvous is not None, run.config
            run.add_part(ElasticFSDPIslands(config) if apart else FSDPIslands(config, run.islands))
        elif run.kind == "Megatron" and run.world is not None:
            from .megatron_training import TrainingElasticIslands, TrainingIslands

            kind: Any = TrainingIslands if run.config.rendezvous is None else TrainingElasticIslands
            run.add_part(kind(run.config, run.world))


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
        from .world import ElasticWorld, IslandWorld

        if self.apart:
            return ElasticWorld(self.number, self.config.island or 0, seed)
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
    many = f"{config.overlap} later exchanges of an element"
    if config.sync_subset == "bernoulli":
        many = f"{config.mean_overlap:.3g} later exchanges of an element on average"
    subset = "" if config.sync_subset == "cyclic" else f" and --sync-subset {config.sync_subset}"
    return f"{many} under way (--sync-delay {config.sync_delay}){subset}"
