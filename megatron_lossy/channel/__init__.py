"""Channels and keyed draws: they decide who loses which units. Pure: no process group, no megatron."""

from .base import Channel, make_channel
