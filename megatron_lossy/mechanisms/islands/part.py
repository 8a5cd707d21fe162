"""Islands of real ranks that may run under ``megatron.training``."""

from __future__ import annotations

from typing import Any

from ...ledger import Patch
from . import megatron_training
from .ranks import RankIslands


class TrainingIslands(RankIslands):
    """Islands that may run under ``megatron.training``."""

    def training_patches(self) -> list[Patch]:
        return megatron_training.patches(self)

    def before_arguments(self, args: Any) -> None:
        megatron_training.before_validation(self, args)

    def after_arguments(self, args: Any) -> None:
        megatron_training.enter(self, args)
