"""Refusals of the asynchronous pipeline (docs/async_pipeline.md)."""

from __future__ import annotations

from ...config import STAGE_LOSSES, LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...refusals.core import above

_LOSING = ", ".join(STAGE_LOSSES)


def _stages(config: LossyConfig, facts: Facts) -> int:
    """Stages that update by themselves; 1 if they are not known."""
    if not config.async_pipeline:
        return 1
    return (facts.pipeline if config.virtual_stages is None else config.virtual_stages) or 1


def _cannot_divide(config: LossyConfig, facts: Facts) -> bool:
    return facts.layers is not None and facts.layers % _stages(config, facts) != 0


ASYNC_PIPELINE = Section(
    "async-pipeline",
    "Asynchronous pipeline",
    "--async-pipeline | Megatron-LM's own loop | "
    "needs python -m megatron_lossy.train; the loop of Megatron-LM flushes the pipeline in every iteration",
    lambda c, f: c.async_pipeline and f.flushes,
    "--virtual-stages | real ranks | needs --virtual-workers",
    lambda c, f: c.async_pipeline and c.virtual_stages is not None and f.virtual is False,
    f"{_LOSING} | --async-pipeline | cannot be with --async-pipeline, whose messages between stages are its own",
    lambda c, f: c.async_pipeline and c.loses_between_stages() and f.virtual is False,
    "--num-distributed-optimizer-instances = {facts.optimizer_instances} | --async-pipeline | "
    "must be 1 with --async-pipeline, whose gradient norms are over the ranks of a stage",
    lambda c, f: c.async_pipeline and f.virtual is False and above(f.optimizer_instances, 1),
    "--async-pipeline | --virtual-workers without --virtual-stages | needs --virtual-stages with --virtual-workers",
    lambda c, f: c.async_pipeline and c.virtual_stages is None and f.virtual,
    "--virtual-stages | no distributed optimizer | needs --use-distributed-optimizer",
    lambda c, f: c.async_pipeline and c.virtual_stages is not None and f.distributed_optimizer is False,
    "--virtual-stages | layers that they do not divide | must divide the {facts.layers} layers",
    lambda c, f: c.virtual_stages is not None and _cannot_divide(c, f),
    "--pipeline-model-parallel-size = {facts.pipeline} | --async-pipeline and layers that it does not divide | "
    "must divide the {facts.layers} layers",
    _cannot_divide,
    "--share-embeddings-and-output-weights = on | --async-pipeline | "
    "cannot be with --async-pipeline: the first and the last stage would add up a gradient, and wait for each other",
    lambda c, f: _stages(c, f) > 1 and f.tied,
    "--overlap-param-gather = on | --async-pipeline | "
    "cannot be with --async-pipeline: forward passes use weights that were gathered long before",
    lambda c, f: _stages(c, f) > 1 and f.overlap_param_gather,
    "--fp16 | --async-pipeline | "
    "cannot be with --async-pipeline: an overflow in one stage would have to stop all others; choose --bf16",
    lambda c, f: _stages(c, f) > 1 and f.fp16,
    "--num-experts | --async-pipeline | "
    "cannot be with --async-pipeline: its balance of load is counted over all stages",
    lambda c, f: _stages(c, f) > 1 and f.experts,
    "--num-layers-per-virtual-pipeline-stage | --async-pipeline | "
    "cannot be with --async-pipeline: a stage would have weights of several ages",
    lambda c, f: _stages(c, f) > 1 and f.virtual_pipeline,
    "CUDA graphs | --async-pipeline | "
    "cannot be with --async-pipeline: a captured graph has one version of the weights; turn them off",
    lambda c, f: _stages(c, f) > 1 and f.layer_graphs,
    "--mtp-num-layers | --async-pipeline | cannot be with --async-pipeline: its layers are shared by stages",
    lambda c, f: _stages(c, f) > 1 and f.predicts_more_tokens,
)
