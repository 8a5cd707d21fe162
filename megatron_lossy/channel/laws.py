"""Makes the channel that the flags ask for. The transport replays delivery logs."""

from __future__ import annotations

from ..config import LossyConfig
from ..registry import CHANNELS
from .base import Channel


def make_channel(config: LossyConfig, phase: str) -> Channel:
    """The channel of ``phase``. Raises :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    return CHANNELS.load(loss.model)(loss, config.loss_seed, config.loss_correlation == "source")
