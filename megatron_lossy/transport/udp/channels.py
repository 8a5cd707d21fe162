"""Channels of several sockets as one: each window of a bucket crosses over the one whose turn it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .engine import Channel, Transfer

#: How the rates of several sockets towards one process become one; the others are added up.
_TOGETHER = {"rtt_min": min, "foreign_loss": max}


class Channels:
    """The ``channels`` of one group of ranks, one for each engine of this process.

    All know all windows of all buckets, so that a number means the same in each of them.
    """

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels = list(channels)

    def _of(self, window: int) -> Channel:
        return self._channels[window % len(self._channels)]

    def post(self, phase: str, step: int, window: int, *options: Any) -> Transfer:
        """:meth:`Channel.post`."""
        return self._of(window).post(phase, step, window, *options)

    def send(self, phase: str, step: int, window: int, *options: Any) -> Transfer:
        """:meth:`Channel.send`."""
        return self._of(window).send(phase, step, window, *options)

    def copies(self, phase: str, window: int, *options: Any) -> None:
        """:meth:`Channel.copies`."""
        self._of(window).copies(phase, window, *options)

    def counters(self) -> dict[int, dict[str, int]]:
        """Counters of each peer, over all sockets."""
        return _joined([channel.counters() for channel in self._channels], {})

    def rates(self) -> dict[int, dict[str, float]]:
        """Rates towards each peer, over all sockets."""
        return _joined([channel.rates() for channel in self._channels], _TOGETHER)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()


def _joined(found: Sequence[dict[int, dict[str, Any]]], how: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        peer: {name: how.get(name, sum)([one[peer][name] for one in found]) for name in values}
        for peer, values in found[0].items()
    }
