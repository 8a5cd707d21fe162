"""Flags of a run of :mod:`megatron_lossy.train` that cannot go together, or not with so many ranks. No process group."""

from __future__ import annotations

from ..config import LossyConfig
from ..hooks.checks import check_run
from .config import TrainConfig
from .facts import of_trainer


def check_flags(config: TrainConfig, lossy: LossyConfig, ranks: int) -> None:
    """Raise :class:`UsageError` for what cannot be on ``ranks`` ranks, into which ``config`` must divide."""
    check_run(lossy, of_trainer(config, ranks))
