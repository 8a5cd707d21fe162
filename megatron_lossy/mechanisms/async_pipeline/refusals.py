"""Refusals of the asynchronous pipeline (docs/async_pipeline.md)."""

from __future__ import annotations

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.core import above

_LOSING = ", ".join(LossyConfig.stage_losses)


def _stages(config: LossyConfig, facts: Facts) -> int:
    """Return stages that update by themselves; 1 if they are not known."""
    return (facts.pipeline if config.virtual_stages is None else config.virtual_stages) or 1


def _cannot_divide(config: LossyConfig, facts: Facts) -> bool:
    return facts.layers is not None and facts.layers % _stages(config, facts) != 0


ASYNC_PIPELINE = Section(
    "async-pipeline",
    "Asynchronous pipeline",
    "--async-pipeline | Megatron-LM's own loop | "
    "needs python -m megatron_lossy.train; the loop of Megatron-LM flushes the pipeline in every iteration",
    lambda c, f: f.flushes,
    "--virtual-stages | real ranks | needs --virtual-workers",
    lambda c, f: f.virtual is False and c.virtual_stages is not None,
    f"{_LOSING} | --async-pipeline | cannot be with --async-pipeline, whose messages between stages are its own",
    lambda c, f: f.virtual is False and c.loses_between_stages(),
    "--num-distributed-optimizer-instances = {facts.optimizer_instances} | --async-pipeline | "
    "must be 1 with --async-pipeline, whose gradient norms are over the ranks of a stage",
    lambda c, f: f.virtual is False and above(f.optimizer_instances, 1),
    "--async-pipeline | --virtual-workers without --virtual-stages | needs --virtual-stages with --virtual-workers",
    lambda c, f: f.virtual and c.virtual_stages is None,
    "--virtual-stages | no distributed optimizer | needs --use-distributed-optimizer",
    lambda c, f: f.distributed_optimizer is False and c.virtual_stages is not None,
    "--virtual-stages | layers that they do not divide | must divide the {facts.layers} layers",
    lambda c, f: c.virtual_stages is not None and _cannot_divide(c, f),
    "--pipeline-model-parallel-size = {facts.pipeline} | --async-pipeline and layers that it does not divide | "
    "must divide the {facts.layers} layers",
    _cannot_divide,
    "--share-embeddings-and-output-weights = on | --async-pipeline | "
    "cannot be with --async-pipeline: the first and the last stage would add up a gradient, and wait for each other",
    lambda c, f: f.tied and _stages(c, f) > 1,
    "--overlap-param-gather = on | --async-pipeline | "
    "cannot be with --async-pipeline: forward passes use weights that were gathered long before",
    lambda c, f: f.overlap_param_gather and _stages(c, f) > 1,
    "--fp16 | --async-pipeline | "
    "cannot be with --async-pipeline: an overflow in one stage would have to stop all others; choose --bf16",
    lambda c, f: f.fp16 and _stages(c, f) > 1,
    "--num-experts | --async-pipeline | "
    "cannot be with --async-pipeline: its balance of load is counted over all stages",
    lambda c, f: f.experts and _stages(c, f) > 1,
    "--num-layers-per-virtual-pipeline-stage | --async-pipeline | "
    "cannot be with --async-pipeline: a stage would have weights of several ages",
    lambda c, f: f.virtual_pipeline and _stages(c, f) > 1,
    "CUDA graphs | --async-pipeline | "
    "cannot be with --async-pipeline: a captured graph has one version of the weights; turn them off",
    lambda c, f: f.layer_graphs and _stages(c, f) > 1,
    "--mtp-num-layers | --async-pipeline | cannot be with --async-pipeline: its layers are shared by stages",
    lambda c, f: f.predicts_more_tokens and _stages(c, f) > 1,
)
