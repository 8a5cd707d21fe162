"""Islands: complete training jobs that exchange some of their parameters, late (AsyncMesh, section 4; docs/islands.md)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ...run.mechanism import Mechanism, Part
from .flags import IslandFlags

if TYPE_CHECKING:
    from ...base.jobs import World
    from ...config import LossyConfig
    from ...config.refusal import Section
    from ...run.base import Run


class Islands(Mechanism):
    """The place of islands among the mechanisms."""

    name = "islands"
    Flags = IslandFlags
    phases: ClassVar[Mapping[str, int]] = {"sync-reduce": 4, "sync-gather": 5}
    axes: ClassVar[Mapping[str, tuple[str, bool]]] = {
        "loss rate sync-reduce": ("share of units lost on the way to an owner of means", False),
        "loss rate sync-gather": ("share of means lost on the way back", False),
        "sync bytes": ("bytes that a rank sends in an exchange between islands", False),
        "sync deviation": ("mean squared distance of an island to the mean (weight²)", True),
        "sync progress spread": ("mean squared distance of the remembered progress to its mean (weight²)", True),
    }

    @classmethod
    def refusals(cls) -> Section:
        from .refusals import ISLANDS

        return ISLANDS

    @classmethod
    def check(cls, config: LossyConfig, train_iters: int | None) -> None:
        if config.averages and config.sync_method != "none":
            from .mean import check_between

            check_between(config, train_iters)
        if config.averages and config.island_schedule is not None:
            from .schedule import read_schedule

            read_schedule(config.island_schedule, config.islands, train_iters)

    @classmethod
    def advice(cls, config: LossyConfig, iterations: int | None) -> list[str]:
        from .advice import advice

        return advice(config, iterations)

    @classmethod
    def memory(cls, config: LossyConfig, device: Any) -> Sequence[Any]:
        from .memory import kept

        return kept(config, device)

    @classmethod
    def more_saved(cls, config: LossyConfig, weights: int, compute: int, virtual: bool) -> float:
        from .memory import more_saved

        return more_saved(config, weights, compute, virtual)

    @classmethod
    def world(cls, config: LossyConfig, seed: int) -> World | None:
        if not config.averages:
            return None
        if config.rendezvous is not None:
            from .world import ElasticWorld

            return ElasticWorld(config.islands, config.island or 0, seed)
        from .world import IslandWorld

        return IslandWorld(config.islands, seed)

    @classmethod
    def part(cls, config: LossyConfig, world: World | None) -> Part | None:
        if world is None:
            return None
        if config.rendezvous is not None:
            from .elastic.megatron_training import TrainingElasticIslands
            from .world import ElasticWorld

            assert isinstance(world, ElasticWorld), world
            return TrainingElasticIslands(config, world)
        from .world import IslandWorld

        assert isinstance(world, IslandWorld), world
        from .megatron_training import TrainingIslands

        return TrainingIslands(config, world)

    @classmethod
    def fsdp_part(cls, config: LossyConfig, islands: Sequence[Sequence[int]] | None) -> Part | None:
        if islands is None or not config.averages:
            return None
        from .fsdp import FSDPIslands

        return FSDPIslands(config, islands)

    @classmethod
    def virtual_run(
        cls, config: LossyConfig, workers: int, iterations: int, seed: int, whole_optimizers: bool
    ) -> Run | None:
        if not config.averages:
            return None
        if config.island_schedule is not None:
            from .virtual_churn import ChurningIslands

            return ChurningIslands(config, workers, iterations, seed, gapless=True)
        from .virtual import VirtualIslands

        return VirtualIslands(config, workers, iterations, seed, gapless=True)

    @classmethod
    def workers(cls, run: Any) -> Any:
        if not run.config.averages:
            return None
        from .virtual import VirtualIslands
        from .workers import IslandWorkers

        return IslandWorkers if isinstance(run, VirtualIslands) else None
