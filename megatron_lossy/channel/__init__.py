"""Channels and keyed draws: they decide which links lose which units. Pure: no process group, no megatron."""

from .base import Channel, make_channel
