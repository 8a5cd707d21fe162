"""The channels that flags ask for, their checks against a run, the nodes of ranks, and the secret that ranks share."""

from __future__ import annotations

import logging
import os
import socket
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..base.errors import refuse
from ..base.exchange import Stream
from ..base.files import read_key
from ..channel import Channel, make_channel
from ..config import PHASES, LossyConfig
from ..delivery_log.replay import Recording

logger = logging.getLogger(__name__)

_NOTHING = "no link leaves a node, and nothing can be lost"


def channel_of(config: LossyConfig, phase: str) -> Channel:
    """Return the channel of ``phase``, which may replay a run. Raise :class:`UsageError` for unreadable files."""
    loss = config.phase(phase)
    if loss.trace is not None and loss.trace.is_dir():
        return Recording(config, loss.trace)
    return make_channel(config, phase)


def check_channels(config: LossyConfig, size: int, steps: int | None) -> None:
    """Raise :class:`UsageError` if the files of ``config`` do not fit ``size`` ranks or ``steps`` iterations."""
    for phase in PHASES:
        if not config.phase(phase).lossless:
            channel_of(config, phase).check(phase, Stream(), config.members(size), None, steps)


def consecutive_nodes(ranks: Sequence[int], ranks_per_node: int) -> list[int]:
    """Return the node number of each of ``ranks``, of which ``ranks_per_node`` share a node.

    Raise :class:`UsageError` as :func:`find_nodes`.
    """
    nodes = [rank // ranks_per_node for rank in ranks]
    if len(nodes) > 1 and len(set(nodes)) == 1:
        why = f"puts all {len(nodes)} ranks on one node: {_NOTHING}"
        raise refuse("--lossy-links", f"inter-node:{ranks_per_node}", why)
    return nodes


def find_nodes(group: dist.ProcessGroup | None, ranks_per_node: int = 0) -> list[int]:
    """Return the node number of every rank of ``group``, for ``--lossy-links inter-node``.

    Found by host name (a collective call), or by ``ranks_per_node`` consecutive global ranks (``--lossy-links inter-node:N``).
    Raise :class:`UsageError` if several ranks are all on one node: nothing could be lost between them.
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


def read_key_file(path: str | None) -> bytes | None:
    """Return the secret of ``--udp-key-file`` in ``path``; ``None`` for ``None`` and "none".

    Raise :class:`UsageError` if the file cannot be read or is too short.
    """
    if path in (None, "none"):
        return None
    new = "(set -C; umask 077; head -c 32 /dev/urandom > new.key)"  # -C: no file that is there is overwritten
    key = read_key(path, "--udp-key-file", f"; give another file: {new}")
    mode = stat.S_IMODE(Path(path).stat().st_mode)
    if mode & 0o077 and os.environ.get("LOCAL_RANK", "0") == "0":  # one rank of a host says so
        _say_open(path, mode)
    return key


def choose_congestion(made: socket.socket, name: str | None) -> None:
    """Give the TCP socket ``made`` the congestion control ``name``; ``None``: it keeps that of the host.

    Raise :class:`UsageError` for one that the kernel does not have, or does not allow.
    """
    try:
        if name is not None:
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        allowed = "sysctl net.ipv4.tcp_allowed_congestion_control lists those of this host"
        raise refuse("--udp-rate", name, f"{error.strerror}: {allowed}") from None


def check_network(config: LossyConfig) -> None:
    """Raise :class:`UsageError` for a key file or a congestion control that this host cannot use."""
    read_key_file(config.udp_key_file)
    if config.transport == "stream":
        with socket.socket() as probe:
            choose_congestion(probe, config.stream_congestion)


@cache
def _say_open(path: str, mode: int) -> None:
    # This is no error: secrets that a container mounts often have such a mode, and it cannot be changed.
    logger.warning(
        "--udp-key-file %s: other users of this host may read it (mode %03o); chmod 600 %s", path, mode, path
    )
