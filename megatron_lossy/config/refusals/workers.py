"""Refusals of numbers of workers, and of workers that share a process (docs/virtual.md)."""

from __future__ import annotations

from .. import LossyConfig
from ..facts import Facts
from ..refusal import Section
from .row import Row, draws_losses


def _loses_nothing(config: LossyConfig, facts: Facts) -> bool:
    """Whether losses are asked for although a lone rank exchanges nothing."""
    over_udp = config.transport == "udp" and not config.uses_transport()
    loses_own = config.lossy_self and not config.phase("grad").lossless
    return (
        facts.largest_group == 1 and not config.jobs().several and (over_udp or draws_losses(config)) and not loses_own
    )


def _on_one_node(config: LossyConfig, facts: Facts) -> bool:
    return bool(facts.virtual and config.ranks_of_node is not None)


def _beyond(config: LossyConfig, facts: Facts) -> list[int]:
    """Ranks of ``--grad-error-ranks`` that do not exist."""
    if facts.workers is None:
        return []
    return [rank for rank in config.grad_error_ranks or () if rank >= facts.workers]


WORKERS = Section(
    "workers",
    "Ranks and virtual workers",
    (
        Row(
            flag="--lossy-links",
            beside="--virtual-workers, without N",
            why="needs inter-node:N with --virtual-workers",
            when=lambda config, facts: _on_one_node(config, facts) and not config.ranks_of_node,
        ),
        Row(
            flag="--lossy-links",
            beside="no more --virtual-workers",
            why="puts all {facts.workers} ranks on one node: no link leaves a node, and nothing can be lost",
            when=lambda config, facts: (
                _on_one_node(config, facts) and facts.workers is not None and 1 < facts.workers <= config.ranks_of_node
            ),
        ),
        Row(
            flag="--ddp-param-name-patterns-for-fp32-local-accumulation",
            beside="--virtual-workers",
            why="virtual workers take gradients from Megatron's buffers; needs real ranks",
            when=lambda config, facts: facts.virtual and facts.gradients_beside_buffers,
        ),
        Row(
            flag="--grad-error-ranks",
            beside="fewer data-parallel ranks",
            value="{beyond}",
            why="must be below the {facts.workers} data-parallel ranks",
            terms=lambda config, facts: {"beyond": _beyond(config, facts)[0]},
            when=_beyond,
        ),
        Row(
            flag="data-parallel size",
            beside="losses",
            value="{facts.largest_group}",
            why="one rank exchanges nothing, so that nothing can be lost; start at least two "
            "(torchrun --nproc-per-node 2 …, or --virtual-workers), or set no loss rate and no --transport udp",
            when=_loses_nothing,
        ),
    ),
)
