"""The channels by the values of ``--loss-model``."""

from __future__ import annotations

from ..config import LossyConfig
from .base import Channel
from .bernoulli import Bernoulli
from .gilbert_elliott import GilbertElliott
from .per_link import PerLink
from .trace import Trace

CHANNELS: dict[str, type[Channel]] = {
    "bernoulli": Bernoulli,
    "gilbert-elliott": GilbertElliott,
    "per-link": PerLink,
    "trace": Trace,
}


def make_channel(config: LossyConfig, phase: str) -> Channel:
    """The channel of ``phase``. Raises :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    return CHANNELS[loss.model](loss, config.loss_seed, config.loss_correlation == "source")
