"""Who loses what: channels and keyed draws. Pure: no process group, no megatron."""

from .base import Channel
from .exchange import Exchange, Stream
from .network import CHANNELS, Deliveries, Network, check_channels, make_channel

__all__ = ["CHANNELS", "Channel", "Deliveries", "Exchange", "Network", "Stream", "check_channels", "make_channel"]
