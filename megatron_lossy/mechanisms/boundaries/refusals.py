"""Refusals of losses between pipeline stages (docs/boundaries.md)."""

from __future__ import annotations

from collections.abc import Mapping

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.core import OFF, above
from .flags import BoundaryFlags

_LOSING = ", ".join(BoundaryFlags.stage_losses)


def _at_virtual(config: LossyConfig) -> bool:
    """Return whether virtual boundaries lose anything."""
    return config.loses_at_boundaries and config.virtual_boundaries is not None


def _of_one_stage(config: LossyConfig, facts: Facts) -> bool:
    return config.loses_at_boundaries and config.virtual_boundaries is None and facts.pipeline == 1


def _beyond_layers(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the last boundary of the model, if ``--virtual-boundaries`` has later ones."""
    if not _at_virtual(config) or facts.layers is None or max(config.virtual_boundaries) < facts.layers:
        return None
    return {"last": facts.layers - 1}


BOUNDARIES = Section(
    "boundaries",
    "Between pipeline stages",
    "--virtual-boundaries | --lossy-links inter-node | cannot be on a node: --lossy-links inter-node",
    lambda c, f: c.virtual_boundaries and c.ranks_of_node is not None,
    f"{_LOSING} | one pipeline stage without --virtual-boundaries | "
    "nothing is sent with one pipeline stage; needs more of them, or --virtual-boundaries",
    _of_one_stage,
    f"{_LOSING} | --virtual-workers without --virtual-boundaries | needs --virtual-boundaries in one process",
    lambda c, f: f.virtual and c.loses_at_boundaries and c.virtual_boundaries is None,
    "--virtual-boundaries | several pipeline stages | needs one pipeline stage, not {facts.pipeline}",
    lambda c, f: _at_virtual(c) and above(f.pipeline, 1),
    "--virtual-boundaries | one layer | a model of 1 layer has no boundary between layers",
    lambda c, f: f.layers == 1 and _at_virtual(c),
    "--virtual-boundaries | fewer layers | must be layers from 1 to {last} of the {facts.layers}",
    _beyond_layers,
    "--recompute-granularity = full | --virtual-boundaries | "
    "--virtual-boundaries would lose other packets in the recomputation",
    lambda c, f: f.recompute == "full" and _at_virtual(c),
    "CUDA graphs of layers | --virtual-boundaries | "
    "would lose the same or nothing, with --virtual-boundaries; turn them off",
    lambda c, f: f.layer_graphs and _at_virtual(c),
    "--overlap-moe-expert-parallel-comm = on | --virtual-boundaries | "
    "runs layers in parts, between which --virtual-boundaries lose nothing; turn it off",
    lambda c, f: "--overlap-moe-expert-parallel-comm" in f.switches and _at_virtual(c),
    f"--use-ring-exchange-p2p = on | {_LOSING} | nothing can be lost at stage boundaries with it; turn it off",
    lambda c, f: "--use-ring-exchange-p2p" in f.switches and c.loses_at_boundaries,
    f"multi-token prediction on a stage of its own | {_LOSING} | cannot go with --p-act and --p-act-grad",
    lambda c, f: "--mtp-standalone" in f.switches and c.loses_at_boundaries,
    "--packet-bytes | the type of messages | must hold at least one element of {facts.message_bytes} bytes",
    lambda c, f: c.loses_at_boundaries and above(f.message_bytes, c.packet_range[0]),
    f"pipelines of encoder and decoder with their own sizes | {_LOSING} | cannot go with --p-act and --p-act-grad",
    lambda c, f: c.loses_at_boundaries and above(f.pipelines, 1),
    f"MultiModulePipelineCommunicator | {_LOSING} | cannot go with --p-act and --p-act-grad, which take one pipeline",
    lambda c, f: f.several_modules and c.loses_at_boundaries,
    f"{_LOSING} | no distributed optimizer | {OFF}",
    lambda c, f: f.distributed_optimizer is False and c.loses_at_boundaries,
    f"{_LOSING} | FSDP2 and DDP | loses messages between layers and stages of Megatron, which is not there",
    lambda c, f: f.data_parallel and c.loses_at_boundaries,
)
