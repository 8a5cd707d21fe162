"""A channel with the rules that hold for all channels, as one rank sees it.

The own shard never crosses the network; links inside a node may be reliable; receivers of one sender may lose
together (docs/semantics.md, Links).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from ..base.errors import refuse
from ..base.exchange import Exchange, Stream
from ..channel import Channel, make_channel
from ..config import PHASES, LossyConfig
from ..config.facts import Facts
from ..config.refusal import check_refusals
from ..delivery_log.replay import Recorded
from .key_file import read_key_file

_NOTHING = "no link leaves a node, and nothing can be lost"


def channel_of(config: LossyConfig, phase: str) -> Channel:
    """The channel of ``phase``, which may replay a recorded run. Raises :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    if loss.trace is not None and loss.trace.is_dir():
        return Recorded(config, loss.trace)
    return make_channel(config, phase)


def check_key_file(config: LossyConfig) -> None:
    """Raise :class:`UsageError` if the file with the secret of all ranks cannot be used."""
    read_key_file(config.udp_key_file)


def check_ranks(config: LossyConfig, size: int) -> None:
    """Raise :class:`UsageError` if a data-parallel size of ``size`` can lose nothing, though ``config`` wants loss."""
    check_refusals(config, Facts(largest_group=size))


def check_owners(config: LossyConfig) -> None:
    """Raise :class:`UsageError` for flags that real ranks cannot have.

    An example are rules whose owners know what all senders chose.
    """
    check_refusals(config, Facts(virtual=False))


def check_channels(config: LossyConfig, size: int, steps: int | None) -> None:
    """Raise :class:`UsageError` if the files of ``config`` do not fit ``size`` ranks or ``steps`` iterations."""
    for phase in PHASES:
        if not config.phase(phase).lossless:
            channel_of(config, phase).check(phase, Stream(), size, None, steps)


class Network:
    """Deliveries of one phase between the ranks of a full data-parallel (or expert-data) group.

    ``nodes`` gives the node of every rank of the full group; needed for ``--lossy-links inter-node``.
    """

    def __init__(self, config: LossyConfig, phase: str, size: int, nodes: Sequence[int] | None = None) -> None:
        self.phase = phase
        self.size = size
        self.channel = channel_of(config, phase)
        self.lossless = config.phase(phase).lossless
        self.lossy_self = config.lossy_self and phase == "grad"
        self.nodes = np.array(nodes) if config.ranks_of_node is not None else None
        if self.nodes is not None and len(set(nodes)) == 1 and not self.lossy_self:
            self.lossless = True  # no link leaves the node

    def delivered(self, exchange: Exchange, source: int, destination: int, units: int) -> np.ndarray:
        """bool[units]: the units that arrive at ``destination`` from ``source`` (ranks in the full group)."""
        return self.delivered_links(exchange, np.array([source]), np.array([destination]), units)[0]

    def delivered_links(
        self, exchange: Exchange, sources: np.ndarray, destinations: np.ndarray, units: int
    ) -> np.ndarray:
        """bool[L, units]: the units that arrive on each of L links, given as integers [L] (ranks in the full group)."""
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

    def lag(self, exchange: Exchange, source: int, members: Sequence[int], units: int) -> tuple[float, float] | None:
        """The lost share of the units from ``source`` to the other ``members``, and the mean age there, in updates.

        Both hold in the steady state at the rate of this step; ``None`` if the flags do not tell.
        """
        others = np.array([member for member in members if member != source])
        lossy = others if self.nodes is None else others[self.nodes[others] != self.nodes[source]]
        if self.lossless or not lossy.size:
            return 0.0, 0.0
        known = self.channel.lag(exchange.step, source, lossy, units)
        part = lossy.size / others.size
        return None if known is None else (part * known[0], part * known[1])


def consecutive_nodes(ranks: Sequence[int], ranks_per_node: int) -> list[int]:
    """The node number of each of ``ranks``, of which ``ranks_per_node`` share a node.

    Raises :class:`UsageError` as :func:`find_nodes`.
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    if len(nodes) > 1 and len(set(nodes)) == 1:
        raise refuse(
            "--lossy-links", f"inter-node:{ranks_per_node}", f"puts all {len(nodes)} ranks on one node: {_NOTHING}"
        )
    return nodes


def find_nodes(group: dist.ProcessGroup | None, ranks_per_node: int = 0) -> list[int]:
    """The node number of every rank of ``group``, for ``--lossy-links inter-node``.

    Found by host name (a collective call), or by ``ranks_per_node`` consecutive global ranks (``--lossy-links inter-node:N``).
    Raises :class:`UsageError` if several ranks are all on one node: nothing could be lost between them.
    """
    group = group or dist.group.WORLD
    if ranks_per_node:
        return consecutive_nodes(dist.get_process_group_ranks(group), ranks_per_node)
    hosts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(hosts) > 1 and len(set(hosts)) == 1:
        same = f"all {len(hosts)} ranks report the host name {hosts[0]!r}: {_NOTHING}"
        raise refuse("--lossy-links", "inter-node", f"{same}; if they are on several nodes, give inter-node:N")
    return [hosts.index(host) for host in hosts]
