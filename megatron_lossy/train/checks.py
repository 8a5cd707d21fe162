"""Flags of a run of :mod:`megatron_lossy.train` that cannot go together, or not with so many ranks. No process group."""

from __future__ import annotations

from ..channel.corruption import check_error_ranks
from ..config import LossyConfig
from ..delivery_log.errors import recorded_events
from ..hooks.checks import (
    check_boundaries,
    check_loss_per_token,
    check_optimizer,
    check_pipeline,
    check_real_islands,
    check_tied_replicas,
    check_units,
)
from ..sync import check_islands
from ..transport import check_channels, check_owners, check_ranks, check_udp
from ..virtual import VirtualRun
from .config import TrainConfig


def check_flags(config: TrainConfig, lossy: LossyConfig, ranks: int) -> None:
    """Raise :class:`UsageError` for what cannot be on ``ranks`` ranks, into which ``config`` must divide."""
    size = config.data_parallel_size(ranks)
    check_channels(lossy, size, config.train_iters)
    check_udp(lossy)
    check_ranks(lossy, size)
    if not lossy.lossless:
        check_units(config, lossy)
    check_loss_per_token(config, lossy)
    check_boundaries(config, lossy)
    check_pipeline(config, lossy)
    check_optimizer(config, lossy, config.use_distributed_optimizer)
    check_tied_replicas(config, lossy, size)
    check_error_ranks(lossy, size)
    recorded_events(lossy)  # whether they can be read
    check_islands(lossy, size, config.train_iters, config.virtual_workers is not None)
    if config.virtual_workers:
        VirtualRun.check(lossy, config.virtual_workers)
        return
    check_owners(lossy)
    if lossy.averages:
        check_real_islands(config, lossy)
