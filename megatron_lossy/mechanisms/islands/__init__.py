"""Islands: complete training jobs that exchange some of their parameters, late (AsyncMesh, section 4; docs/islands.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from ...run.mechanism import Mechanism
from .flags import IslandFlags


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
            from .fsdp import FSDPIslands

            run.add_part(FSDPIslands(run.config, run.islands))
        elif run.kind == "Megatron" and run.world is not None:
            from .megatron_training import TrainingElasticIslands, TrainingIslands

            kind: Any = TrainingIslands if run.config.rendezvous is None else TrainingElasticIslands
            run.add_part(kind(run.config, run.world))
