"""Checks of the flags and the number of ranks of :mod:`megatron_lossy.train`. They need no process group."""

from __future__ import annotations

from ..config import LossyConfig
from ..hooks.checks import check_run
from .config import TrainConfig
from .facts import of_trainer


def check_flags(config: TrainConfig, lossy: LossyConfig, ranks: int) -> None:
    """Raise :class:`UsageError` for flags that cannot run on ``ranks`` ranks, which ``config`` must divide."""
    check_run(lossy, of_trainer(config, ranks))
