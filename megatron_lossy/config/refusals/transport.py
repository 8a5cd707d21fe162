"""Refusals of transports."""

from __future__ import annotations

from ..facts import Facts
from ..refusal import Section
from .row import IN_MEMORY, OFF, Row

_OLDEST_TORCH = (2, 8)
_LAST_PORT = 65535


def _older_torch(facts: Facts) -> bool:
    """Whether torch fails in a coalescing context without a collective of its own."""
    return facts.torch is not None and tuple(map(int, facts.torch.split(".")[:2])) < _OLDEST_TORCH


TRANSPORT = Section(
    "transport",
    "Transports",
    (
        Row(
            flag="--loss-unit",
            beside="--transport udp",
            why="must be packet with --transport udp, which loses datagrams",
            when=lambda config, facts: config.transport == "udp" and config.loss_unit != "packet",
        ),
        Row(
            flag="--lossy-self",
            beside="--transport udp",
            value="with --transport udp",
            why="cannot be: the own shard never crosses the network",
            when=lambda config, facts: config.transport == "udp" and config.lossy_self,
        ),
        Row(
            flag="--transport",
            beside="torch before 2.8",
            why="needs torch 2.8 or later under Megatron, this is {facts.torch}",
            when=lambda config, facts: config.transport != "torch" and _older_torch(facts),
        ),
        Row(
            flag="--transport",
            beside="--virtual-workers",
            why=IN_MEMORY,
            when=lambda config, facts: config.transport == "udp" and facts.virtual,
        ),
        Row(
            flag="--transport",
            beside="LossyWorkers",
            why="must be torch or pieces: workers of one process exchange in memory",
            when=lambda config, facts: config.transport == "udp" and facts.in_memory,
        ),
        Row(
            flag="--transport",
            beside="no distributed optimizer",
            why=f"carries no all-reduce; {OFF}; choose pieces or torch",
            when=lambda config, facts: config.transport == "udp" and facts.distributed_optimizer is False,
        ),
        Row(
            flag="--udp-port",
            beside="the ranks of a host",
            why="must be at most {last}: each of the {facts.ranks_of_host} ranks of a node takes the next one{each}",
            terms=lambda config, facts: {
                "last": _LAST_PORT + 1 - (facts.ranks_of_host or 1) * config.udp_sockets,
                "each": ""
                if config.udp_sockets == 1
                else f", {config.udp_sockets} with --udp-threads or several interfaces",
            },
            when=lambda config, facts: (
                facts.ranks_of_host is not None
                and config.udp_port + facts.ranks_of_host * config.udp_sockets - 1 > _LAST_PORT
            ),
        ),
        Row(
            flag="--udp-memory",
            beside="the ranks of a group",
            why="must be at least {least}: room for packets to and from each of {facts.largest_group} ranks",
            terms=lambda config, facts: {"least": config.udp_least_memory(facts.largest_group or 1)},
            when=lambda config, facts: (
                config.transport == "udp"
                and facts.largest_group is not None
                and config.udp_memory < config.udp_least_memory(facts.largest_group)
            ),
        ),
    ),
)
