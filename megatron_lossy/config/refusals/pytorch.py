"""Refusals of models of PyTorch's own data parallelism (docs/pytorch.md)."""

from __future__ import annotations

from .. import LossyConfig
from ..facts import Facts
from ..refusal import Section
from .row import Row, above

_BESIDE = "FSDP2 and DDP"


def _copied(config: LossyConfig, facts: Facts) -> bool:
    """Whether tensor-parallel ranks have copies of parameters, without Megatron to tell which ones."""
    return bool(facts.data_parallel and above(facts.tensor, 1))


PYTORCH = Section(
    "pytorch",
    "Models of FSDP2 and DDP",
    (
        Row(
            flag="--eval-weights",
            beside=_BESIDE,
            why="is of training programs; evaluate within owner_weights(), or outside of it",
            when=lambda config, facts: facts.data_parallel and config.eval_weights in ("owner", "both"),
        ),
        Row(
            flag="--p-param",
            beside="DistributedDataParallel",
            why="each replica updates all parameters, and sends none; shard the model with fully_shard",
            when=lambda config, facts: facts.data_parallel == "DDP" and not config.phase("param").lossless,
        ),
        Row(
            flag="--transport",
            beside="DistributedDataParallel",
            why="carries no all-reduce; choose pieces or torch, or shard the model with fully_shard",
            when=lambda config, facts: facts.data_parallel == "DDP" and config.transport == "udp",
        ),
        Row(
            flag="--transport",
            beside="FSDP2 and tensor parallelism",
            why="loses other units of each copy of a parameter; choose pieces or torch",
            when=lambda config, facts: config.transport == "udp" and _copied(config, facts),
        ),
        Row(
            flag=("--grad-recovery", "--grad-priority"),
            beside="FSDP2 and tensor parallelism",
            why="would choose other units of each copy of a parameter; choose another rule, and --grad-priority none",
            when=lambda config, facts: config.chosen() and not config.inert and _copied(config, facts),
        ),
    ),
)
