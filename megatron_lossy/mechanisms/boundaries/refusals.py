"""Refusals of losses between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Callable

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.row import OFF, Row, above
from ...config.transport import UDP_REPORT_BYTES
from .flags import BoundaryFlags

_LOSING = BoundaryFlags.stage_losses
_BESIDE = "--p-act, --p-act-grad"


def _at_virtual(when: Callable[[Facts], object]) -> Callable[[LossyConfig, Facts], bool]:
    """A condition on losses at virtual boundaries."""
    return lambda config, facts: bool(
        config.loses_at_boundaries and config.virtual_boundaries is not None and when(facts)
    )


def _between_stages(when: Callable[[Facts], object]) -> Callable[[LossyConfig, Facts], bool]:
    return lambda config, facts: bool(config.loses_at_boundaries and when(facts))


def _of_one_stage(config: LossyConfig, facts: Facts) -> bool:
    return config.loses_at_boundaries and config.virtual_boundaries is None and facts.pipeline == 1


def _beyond_layers(config: LossyConfig, facts: Facts) -> bool:
    return (
        config.loses_at_boundaries
        and config.virtual_boundaries is not None
        and facts.layers is not None
        and max(config.virtual_boundaries) >= facts.layers
    )


BOUNDARIES = Section(
    "boundaries",
    "Between pipeline stages",
    (
        Row(
            flag="--virtual-boundaries",
            beside="--lossy-links inter-node",
            why="cannot be on a node: --lossy-links inter-node",
            when=lambda config, facts: config.virtual_boundaries and config.ranks_of_node is not None,
        ),
        Row(
            flag="--act-transport",
            beside="--transport torch or pieces",
            why="needs --transport udp",
            when=lambda config, facts: config.act_transport == "udp" and config.transport != "udp",
        ),
        Row(
            flag="--act-transport",
            beside="--virtual-boundaries",
            why="needs real stages: --virtual-boundaries are in one process",
            when=lambda config, facts: config.act_transport == "udp" and config.virtual_boundaries is not None,
        ),
        Row(
            flag="--packet-bytes",
            beside="--act-transport udp",
            why=f"must be at least {UDP_REPORT_BYTES} with --act-transport udp",
            when=lambda config, facts: config.act_transport == "udp" and config.packet_range[0] < UDP_REPORT_BYTES,
        ),
        Row(
            flag="--act-packet-bytes",
            beside="--act-transport udp",
            why="must be at most --packet-bytes ({config.packet_bytes}) with --act-transport udp, where it is a datagram",
            when=lambda config, facts: (
                config.act_transport == "udp" and above(config.act_packet_bytes, config.packet_range[1])
            ),
        ),
        Row(
            flag=_LOSING,
            beside="one pipeline stage",
            why="nothing is sent with one pipeline stage; needs more of them",
            when=lambda config, facts: _of_one_stage(config, facts) and config.act_transport == "udp",
        ),
        Row(
            flag=_LOSING,
            beside="one pipeline stage without --virtual-boundaries",
            why="nothing is sent with one pipeline stage; needs more of them, or --virtual-boundaries",
            when=_of_one_stage,
        ),
        Row(
            flag=_LOSING,
            beside="--virtual-workers without --virtual-boundaries",
            why="needs --virtual-boundaries in one process",
            when=lambda config, facts: (
                config.loses_at_boundaries and config.virtual_boundaries is None and facts.virtual
            ),
        ),
        Row(
            flag="--virtual-boundaries",
            beside="several pipeline stages",
            why="needs one pipeline stage, not {facts.pipeline}",
            when=_at_virtual(lambda facts: above(facts.pipeline, 1)),
        ),
        Row(
            flag="--virtual-boundaries",
            beside="one layer",
            why="a model of 1 layer has no boundary between layers",
            when=_at_virtual(lambda facts: facts.layers == 1),
        ),
        Row(
            flag="--virtual-boundaries",
            beside="fewer layers",
            why="must be layers from 1 to {last} of the {facts.layers}",
            terms=lambda config, facts: {"last": (facts.layers or 1) - 1},
            when=_beyond_layers,
        ),
        Row(
            flag="--recompute-granularity",
            beside="--virtual-boundaries",
            value="full",
            why="--virtual-boundaries would lose other packets in the recomputation",
            when=_at_virtual(lambda facts: facts.recompute == "full"),
        ),
        Row(
            flag="CUDA graphs of layers",
            beside="--virtual-boundaries",
            why="would lose the same or nothing, with --virtual-boundaries; turn them off",
            when=_at_virtual(lambda facts: facts.layer_graphs),
        ),
        Row(
            flag="--overlap-moe-expert-parallel-comm",
            beside="--virtual-boundaries",
            value="on",
            why="runs layers in parts, between which --virtual-boundaries lose nothing; turn it off",
            when=_at_virtual(lambda facts: "--overlap-moe-expert-parallel-comm" in facts.switches),
        ),
        Row(
            flag="--use-ring-exchange-p2p",
            beside=_BESIDE,
            value="on",
            why="nothing can be lost at stage boundaries with it; turn it off",
            when=_between_stages(lambda facts: "--use-ring-exchange-p2p" in facts.switches),
        ),
        Row(
            flag="multi-token prediction on a stage of its own",
            beside=_BESIDE,
            why="cannot go with --p-act and --p-act-grad",
            when=_between_stages(lambda facts: "--mtp-standalone" in facts.switches),
        ),
        Row(
            flag="--act-packet-bytes",
            beside="the type of messages",
            why="must hold at least one element of {facts.message_bytes} bytes",
            when=lambda config, facts: (
                config.loses_at_boundaries
                and above(facts.message_bytes, config.act_packet_bytes or config.packet_range[0])
            ),
        ),
        Row(
            flag="pipelines of encoder and decoder with their own sizes",
            beside=_BESIDE,
            why="cannot go with --p-act and --p-act-grad",
            when=_between_stages(lambda facts: above(facts.pipelines, 1)),
        ),
        Row(
            flag="MultiModulePipelineCommunicator",
            beside=_BESIDE,
            why="cannot go with --p-act and --p-act-grad, which know one pipeline",
            when=_between_stages(lambda facts: facts.several_modules),
        ),
        Row(
            flag=_LOSING,
            beside="no distributed optimizer",
            why=OFF,
            when=_between_stages(lambda facts: facts.distributed_optimizer is False),
        ),
        Row(
            flag=_LOSING,
            beside="FSDP2 and DDP",
            why="loses messages between layers and stages of Megatron, which is not there",
            when=_between_stages(lambda facts: facts.data_parallel),
        ),
    ),
)
