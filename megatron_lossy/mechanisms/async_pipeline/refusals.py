"""Refusals of the asynchronous pipeline (docs/async_pipeline.md)."""

from __future__ import annotations

from collections.abc import Callable

from ...config import STAGE_LOSSES, LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.row import Row, above


def _stages(config: LossyConfig, facts: Facts) -> int:
    """Stages that update by themselves; 1 if they are not known."""
    if not config.async_pipeline:
        return 1
    return (facts.pipeline if config.virtual_stages is None else config.virtual_stages) or 1


def _excluded(flag: str, why: str, when: Callable[[Facts], object], value: str | None = None) -> Row:
    """The refusal of a setting that several stages exclude."""
    return Row(
        flag=flag,
        beside="--async-pipeline",
        value=value,
        why=f"cannot be with --async-pipeline: {why}",
        when=lambda config, facts: _stages(config, facts) > 1 and when(facts),
    )


def _cannot_divide(config: LossyConfig, facts: Facts) -> bool:
    return facts.layers is not None and facts.layers % _stages(config, facts) != 0


ASYNC_PIPELINE = Section(
    "async-pipeline",
    "Asynchronous pipeline",
    (
        Row(
            flag="--weight-stashing",
            beside="--virtual-stages",
            why="needs real stages: a virtual backward pass has no other weights than its forward pass",
            when=lambda config, facts: (
                config.async_pipeline and config.virtual_stages is not None and config.weight_stashing == "off"
            ),
        ),
        Row(
            flag="--async-pipeline",
            beside="Megatron-LM's own loop",
            why="needs python -m megatron_lossy.train; the loop of Megatron-LM flushes the pipeline in every iteration",
            when=lambda config, facts: config.async_pipeline and facts.flushes,
        ),
        Row(
            flag="--virtual-stages",
            beside="real ranks",
            why="needs --virtual-workers",
            when=lambda config, facts: (
                config.async_pipeline and config.virtual_stages is not None and facts.virtual is False
            ),
        ),
        Row(
            flag=STAGE_LOSSES,
            beside="--async-pipeline",
            why="cannot be with --async-pipeline, whose messages between stages are its own",
            when=lambda config, facts: (
                config.async_pipeline and config.loses_between_stages() and facts.virtual is False
            ),
        ),
        Row(
            flag="--num-distributed-optimizer-instances",
            beside="--async-pipeline",
            value="{facts.optimizer_instances}",
            why="must be 1 with --async-pipeline, whose gradient norms are over the ranks of a stage",
            when=lambda config, facts: (
                config.async_pipeline and facts.virtual is False and above(facts.optimizer_instances, 1)
            ),
        ),
        Row(
            flag="--save-replicas",
            beside="--async-pipeline --weight-stashing off",
            why="cannot compute again what is under way without the weights it began with; needs --weight-stashing on",
            when=lambda config, facts: (
                config.save_replicas and config.weight_stashing == "off" and _stages(config, facts) > 1
            ),
        ),
        Row(
            flag="--async-pipeline",
            beside="--virtual-workers without --virtual-stages",
            why="needs --virtual-stages with --virtual-workers",
            when=lambda config, facts: config.async_pipeline and config.virtual_stages is None and facts.virtual,
        ),
        Row(
            flag="--virtual-stages",
            beside="no distributed optimizer",
            why="needs --use-distributed-optimizer",
            when=lambda config, facts: (
                config.async_pipeline and config.virtual_stages is not None and facts.distributed_optimizer is False
            ),
        ),
        Row(
            flag="--virtual-stages",
            beside="layers that they do not divide",
            why="must divide the {facts.layers} layers",
            when=lambda config, facts: config.virtual_stages is not None and _cannot_divide(config, facts),
        ),
        Row(
            flag="--pipeline-model-parallel-size",
            beside="--async-pipeline and layers that it does not divide",
            value="{facts.pipeline}",
            why="must divide the {facts.layers} layers",
            when=_cannot_divide,
        ),
        _excluded(
            "--share-embeddings-and-output-weights",
            "the first and the last stage would add up a gradient, and wait for each other",
            lambda facts: facts.tied,
            "on",
        ),
        _excluded(
            "--overlap-param-gather",
            "forward passes use weights that were gathered long before",
            lambda facts: facts.overlap_param_gather,
            "on",
        ),
        _excluded(
            "--fp16", "an overflow in one stage would have to stop all others; choose --bf16", lambda facts: facts.fp16
        ),
        _excluded("--num-experts", "its balance of load is counted over all stages", lambda facts: facts.experts),
        _excluded(
            "--num-layers-per-virtual-pipeline-stage",
            "a stage would have weights of several ages",
            lambda facts: facts.virtual_pipeline,
        ),
        _excluded(
            "CUDA graphs",
            "a captured graph has one version of the weights; turn them off",
            lambda facts: facts.layer_graphs,
        ),
        _excluded("--mtp-num-layers", "its layers are shared by stages", lambda facts: facts.predicts_more_tokens),
    ),
)
