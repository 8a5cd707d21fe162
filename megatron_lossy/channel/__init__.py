"""Who loses what: channels and keyed draws. Pure: no process group, no megatron."""

from .base import Channel
from .laws import CHANNELS, make_channel

__all__ = ["CHANNELS", "Channel", "make_channel"]
