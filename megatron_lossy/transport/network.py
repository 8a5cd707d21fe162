"""A channel with the rules that hold for all of them, as one rank sees it.

The own shard never crosses the network; links inside a node may be reliable; receivers of one sender may lose
together (docs/semantics.md, Links).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from ..channel import Channel, make_channel
from ..config import PHASES, LossyConfig
from ..delivery_log.replay import Recorded
from ..exchange import Exchange, Stream


def channel_of(config: LossyConfig, phase: str) -> Channel:
    """The channel of ``phase``, be it a recorded run. Raises :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    if loss.trace is not None and loss.trace.is_dir():
        return Recorded(config, loss.trace)
    return make_channel(config, phase)


def check_channels(config: LossyConfig, size: int, steps: int | None) -> None:
    """Raise :class:`UsageError` if the files of ``config`` do not fit ``size`` ranks or ``steps`` iterations."""
    for phase in PHASES:
        if not config.phase(phase).lossless:
            channel_of(config, phase).check(phase, Stream(), size, None, steps)


class Network:
    """What arrives in one phase between the ranks of a full data-parallel (or expert-data) group.

    ``nodes`` gives the node of every rank of the full group; needed for ``--lossy-links inter-node``.
    """

    def __init__(self, config: LossyConfig, phase: str, size: int, nodes: Sequence[int] | None = None) -> None:
        self.phase = phase
        self.size = size
        self.channel = channel_of(config, phase)
        self.lossless = config.phase(phase).lossless
        self.lossy_self = config.lossy_self and phase == "grad"
        self.nodes = np.array(nodes) if config.lossy_links == "inter-node" else None

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        """bool[units]: what arrives at ``destination`` from ``source`` (ranks in the full group)."""
        return self.delivered_links(exchange, np.array([source]), np.array([destination]), units)[0]

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """bool[L, units]: what arrives on each of L links, given as integers [L] (ranks in the full group)."""
        assert exchange.phase == self.phase
        if self.lossless:
            return np.ones((len(sources), units), dtype=bool)
        own = sources == destinations
        reliable = np.zeros_like(own) if self.lossy_self else own
        if self.nodes is not None:
            reliable = reliable | ~own & (self.nodes[sources] == self.nodes[destinations])
        if not reliable.any():
            return self.channel.delivered_links(exchange, sources, destinations, units)
        result = np.ones((len(sources), units), dtype=bool)
        lossy = np.flatnonzero(~reliable)
        if lossy.size:
            result[lossy] = self.channel.delivered_links(exchange, sources[lossy], destinations[lossy], units)
        return result


def find_nodes(group: dist.ProcessGroup | None, ranks_per_node: int = 0) -> list[int]:
    """The node number of every rank of ``group``.

    By host name (a collective call), or by ``ranks_per_node`` consecutive global ranks (``--ranks-per-node``).
    """
    group = group or dist.group.WORLD
    if ranks_per_node:
        return [rank // ranks_per_node for rank in dist.get_process_group_ranks(group)]
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    return [hosts.index(host) for host in hosts]
