"""Refusals of coded exchanges (docs/compression.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.coding import block_bytes
from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.core import OFF, above

_FLAGS = "--grad-wire, --param-wire"


def _larger_block(config: LossyConfig, facts: Facts) -> Mapping[str, Any] | None:
    """Return the code of most bits and the bytes of its block, if no packet holds it."""
    bits = max(*config.wire_bits.values(), config.sync_bits, 0)
    needed = block_bytes(bits, config.wire_block) if bits else 0
    needed += 4 * config.refreshes  # numbers in float32
    short = config.loss_unit == "packet" and config.packet_range[0] < needed
    return {"code": f"int{bits}", "needed": needed} if short else None


def _copies_differ(config: LossyConfig, facts: Facts) -> bool:
    """Return whether tensor-parallel ranks have copies of parameters that would be rounded apart, and stay apart."""
    return bool(config.wire_bits and (facts.copies_apart or (facts.data_parallel and above(facts.tensor, 1))))


COMPRESSION = Section(
    "compression",
    "Coded exchanges",
    "--param-wire | --loss-unit shard or bucket | needs --loss-unit packet",
    lambda c, f: c.param_wire != "raw" and c.loss_unit != "packet",
    "--packet-bytes | --grad-wire, --param-wire, --sync-dtype int8 or int4 and a larger block | "
    "holds no block of {config.wire_block} ({code} needs {needed})",
    _larger_block,
    f"{_FLAGS} | real ranks and --transport torch, or --islands and udp or stream, which cross between islands only | "
    "needs --transport pieces, or without --islands udp or stream, on real ranks (torch's collectives carry raw values)",
    lambda c, f: f.virtual is False and c.wire_bits and c.within == "torch",
    f"{_FLAGS} | no distributed optimizer | no all-reduce carries codes; {OFF}",
    lambda c, f: f.distributed_optimizer is False and c.wire_bits,
    f"{_FLAGS} | DistributedDataParallel | no all-reduce carries codes; shard the model with fully_shard",
    lambda c, f: f.data_parallel == "DDP" and c.wire_bits,
    f"{_FLAGS} | copies of a parameter on tensor-parallel ranks | "
    "tensor-parallel copies that Megatron does not add up drift apart; turn on --sequence-parallel",
    _copies_differ,
)
