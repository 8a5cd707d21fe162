"""Refusals of features of Megatron that go with no loss."""

from __future__ import annotations

from ...base.registry import GRAD_RECOVERIES
from ...channel.corruption.bit_flip import ALLOWED_BITS
from .. import LossyConfig
from ..facts import Facts
from ..refusal import Section
from .row import Row, switch

_LAYER_WISE = "layer-wise optimizers gather differently; choose adam or sgd"
_ONE_DRAW = "a captured graph repeats one draw for ever"


def _adds_up_steps(config: LossyConfig) -> bool:
    return not config.untouched("grad") and GRAD_RECOVERIES.load(config.grad_recovery).carries_over


def _largest_element(config: LossyConfig, facts: Facts) -> int:
    """Bytes of the largest element that crosses; 0 if none is known."""
    known = facts.gradient_bytes is not None and facts.weight_bytes is not None
    return max(facts.gradient_bytes or 0, facts.weight_bytes or 0, config.element_bytes()) if known else 0


CORE = Section(
    "core",
    "Megatron and losses",
    (
        Row(
            flag="--optimizer",
            beside="losses",
            why=_LAYER_WISE,
            value="{facts.optimizer}",
            when=lambda config, facts: not config.inert and facts.layer_wise,
        ),
        Row(
            flag="LayerWiseDistributedOptimizer",
            beside="losses",
            why=_LAYER_WISE,
            when=lambda config, facts: not config.inert and facts.layer_wise_parameters,
        ),
        *(
            switch(flag, "losses", f"cannot go with loss ({why}); turn it off")
            for flag, why in {
                "--use-megatron-fsdp": "Megatron-FSDP shards by itself",
                "--use-torch-fsdp2": "torch FSDP shards by itself",
                "--optimizer-cuda-graph": _ONE_DRAW,
                "--reuse-grad-buf-for-mxfp8-param-ag": "stale parameters would live in the gradient buffer",
            }.items()
        ),
        Row(
            flag="--cuda-graph-scope full_iteration",
            beside="losses",
            why=f"{_ONE_DRAW}; turn it off",
            when=lambda config, facts: not config.inert and facts.full_iteration_graph,
        ),
        Row(
            flag="--fp8-param-gather",
            beside="lost parameters",
            value="with parameter loss",
            why="stale bytes would be read at new scales; turn one off",
            when=lambda config, facts: not config.untouched("param") and "--fp8-param-gather" in facts.switches,
        ),
        Row(
            flag="--packet-bytes",
            beside="the type of gradients, weights or --sync-dtype",
            why="must hold at least one element of {needed} bytes",
            terms=lambda config, facts: {"needed": _largest_element(config, facts)},
            when=lambda config, facts: (
                config.loss_unit == "packet"
                and not config.lossless
                and config.packet_range[0] < _largest_element(config, facts)
            ),
        ),
        Row(
            flag="--grad-error-bits",
            beside="--grad-reduce-in-bf16",
            why=ALLOWED_BITS.format(last=15),
            when=lambda config, facts: (
                not config.inert
                and facts.gradient_bytes == 2
                and config.grad_error_bits is not None
                and config.grad_error_bits[1] > 15
            ),
        ),
        Row(
            flag="--non-persistent-ckpt-type",
            beside="--save-replicas",
            value="{facts.non_persistent_checkpoints}",
            why="such checkpoints hold no replicas, and a run that resumes from one would not continue bit for bit; "
            "omit it or --save-replicas",
            when=lambda config, facts: (
                not config.inert and config.save_replicas and facts.non_persistent_checkpoints is not None
            ),
        ),
        Row(
            flag="--grad-recovery",
            beside="--calculate-per-token-loss",
            why="mixes gradients of several steps, which --calculate-per-token-loss makes sums over as many tokens as "
            "each step has; choose another rule or omit that flag",
            when=lambda config, facts: facts.per_token_loss and _adds_up_steps(config),
        ),
    ),
)
