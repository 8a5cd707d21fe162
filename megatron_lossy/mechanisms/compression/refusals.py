"""Refusals of coded exchanges (docs/compression.md)."""

from __future__ import annotations

from ...base.coding.blocks import BlockCode
from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.row import OFF, Row, above

_FLAGS = ("--grad-wire", "--param-wire")


def _bits(config: LossyConfig) -> int:
    """The most bits of an element that crosses in codes; 0 if nothing does."""
    return max(*config.wire_bits.values(), config.sync_bits, 0)


def _needed(config: LossyConfig) -> int:
    """The least bytes of a packet in which a block of each phase fits; 0 if nothing crosses in codes."""
    return BlockCode(_bits(config), config.wire_block).block_bytes if _bits(config) else 0


def _apart(config: LossyConfig, facts: Facts) -> bool:
    """Whether tensor-parallel ranks have copies of parameters that would be rounded apart, and stay apart."""
    return bool(config.wire_bits and (facts.copies_apart or (facts.data_parallel and above(facts.tensor, 1))))


COMPRESSION = Section(
    "compression",
    "Coded exchanges",
    (
        Row(
            flag="--param-wire",
            beside="--loss-unit shard or bucket",
            why="needs --loss-unit packet",
            when=lambda config, facts: config.param_wire != "raw" and config.loss_unit != "packet",
        ),
        Row(
            flag="--packet-bytes",
            beside="--grad-wire, --param-wire, --sync-dtype int8 and a larger block",
            why="holds no block of {config.wire_block} ({code} needs {needed})",
            terms=lambda config, facts: {"needed": _needed(config), "code": f"int{_bits(config)}"},
            when=lambda config, facts: (
                _bits(config) and config.loss_unit == "packet" and config.packet_range[0] < _needed(config)
            ),
        ),
        Row(
            flag=_FLAGS,
            beside="real ranks and --transport torch",
            why="needs --transport pieces or udp on real ranks (torch's collectives carry raw values)",
            when=lambda config, facts: facts.virtual is False and config.wire_bits and config.transport == "torch",
        ),
        Row(
            flag=_FLAGS,
            beside="no distributed optimizer",
            why=f"no all-reduce carries codes; {OFF}",
            when=lambda config, facts: facts.distributed_optimizer is False and config.wire_bits,
        ),
        Row(
            flag=_FLAGS,
            beside="DistributedDataParallel",
            why="no all-reduce carries codes; shard the model with fully_shard",
            when=lambda config, facts: facts.data_parallel == "DDP" and config.wire_bits,
        ),
        Row(
            flag=_FLAGS,
            beside="copies of a parameter on tensor-parallel ranks",
            why="tensor-parallel copies that Megatron does not add up drift apart; turn on --sequence-parallel",
            when=_apart,
        ),
    ),
)
