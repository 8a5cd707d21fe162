"""Refusals of full replicas, of their errors and of averages that keep them equal (docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Mapping

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.core import OFF, ONE_EMBEDDING, above

_UPDATES = "needs replicas that each update everything; parameters that are lost belong to the distributed optimizer"
_FULL = (
    "needs replicas that each have all of the optimizer (in the trainer --no-use-distributed-optimizer); "
    "with the distributed optimizer "
)
_GATHERS = f"{_FULL}the all-gather already synchronises parameters"
_SUMS = "gradients are sums over tokens where errors hit them, with --calculate-per-token-loss; "
_OVERFLOWS = (
    "without the distributed optimizer, replicas that differ would skip different updates; choose --bf16 alone, "
    "or --replica-check repair"
)
_COPIES = (
    "two stages have a copy of the embedding, which {what} would round apart with {facts.workers} replicas; "
    + ONE_EMBEDDING
)
_SHARDED = "the distributed optimizer"
_LOST = "lost parameters"


def _replicas_differ(config: LossyConfig) -> bool:
    """Return whether replicas can differ, and so disagree on an overflow."""
    return (config.drives_apart or config.synchronises) and config.replica_check != "repair"


def _sums_absolute_noise(config: LossyConfig, facts: Facts) -> bool:
    """Return whether gradients are sums over tokens, and the noise in them is not relative."""
    absolute = config.error_kind == "gaussian" and not config.noise.relative
    return bool(facts.per_token_loss and not config.inert and absolute)


def _scale(config: LossyConfig, facts: Facts) -> Mapping[str, str] | None:
    """Return the loss scale of float16, if replicas that differ would not agree on it."""
    if facts.distributed_optimizer is not False or not facts.fp16 or not _replicas_differ(config):
        return None
    return {"scale": "on" if facts.loss_scale is None else f"with --loss-scale {facts.loss_scale:g}"}


def _copied(config: LossyConfig, facts: Facts) -> Mapping[str, str] | None:
    """Return the flag of averages on different stages that would make the copies of an embedding differ.

    Each stage adds up its own copy, among other parameters. Sums of more than two replicas round differently there.
    """
    averages = config.synchronises or config.replica_check == "repair"
    if not (averages and above(facts.workers, 2) and above(facts.pipeline, 1) and facts.copies_embedding):
        return None
    return {"what": "--param-sync-interval" if config.synchronises else "--replica-check repair"}


REPLICAS = Section(
    "replicas",
    "Full replicas, and errors in gradients",
    f"--param-sync-interval | {_LOST} | {_UPDATES}",
    lambda c, f: not c.phase("param").lossless and c.synchronises,
    f"--replica-check | {_LOST} | {_UPDATES}",
    lambda c, f: not c.phase("param").lossless and c.replica_check != "none",
    f"--grad-error-at | {_LOST} | {_UPDATES}",
    lambda c, f: not c.phase("param").lossless and c.errs_apart,
    f"--grad-error | --calculate-per-token-loss | {_SUMS}choose gaussian:STDrms",
    _sums_absolute_noise,
    f"--param-sync-rule | --calculate-per-token-loss | {_SUMS}choose divergence",
    lambda c, f: f.per_token_loss and c.sync_rule[0] == "snr",
    f"--param-sync-interval | {_SHARDED} | {_GATHERS}",
    lambda c, f: f.distributed_optimizer and c.synchronises,
    f"--replica-check | {_SHARDED} | {_FULL}each gradient is at one rank",
    lambda c, f: f.distributed_optimizer and c.replica_check != "none",
    f"--grad-error-at | {_SHARDED} | {_FULL}choose reduce: an error of an owner's shard",
    lambda c, f: f.distributed_optimizer and c.errs_apart,
    f"--p-param | no distributed optimizer | {OFF}",
    lambda c, f: f.distributed_optimizer is False and not c.phase("param").lossless,
    f"--p-grad | no distributed optimizer | {OFF}",
    lambda c, f: f.distributed_optimizer is False and not (f.data_parallel or c.phase("grad").lossless),
    "--p-grad | DistributedDataParallel | drives replicas apart; "
    "needs --param-sync-interval, of more updates than the run has if they may drift",
    lambda c, f: f.data_parallel == "DDP" and not (c.phase("grad").lossless or c.synchronises),
    f"--fp16 = {{scale}} | replicas that differ | {_OVERFLOWS}",
    _scale,
    f"--loss-scale = {{facts.loss_scale:g}} | replicas that differ | {_OVERFLOWS}",
    lambda c, f: f.distributed_optimizer is False and f.loss_scale and _replicas_differ(c),
    "--optimizer-cpu-offload | full replicas | replicas are averaged where they are; turn it off",
    lambda c, f: f.distributed_optimizer is False and "--optimizer-cpu-offload" in f.switches and not c.inert,
    "--check-weight-hash-across-dp-replicas-interval = {facts.weight_hash_interval} | replicas that differ | "
    "ends runs whose replicas differ; turn it off",
    lambda c, f: (
        f.distributed_optimizer is False and f.weight_hash_interval and c.drives_apart and c.replica_check != "repair"
    ),
    f"--check-weight-hash-across-dp-replicas-interval = with parameter loss | {_LOST} | "
    "replicas differ on purpose; turn one off",
    lambda c, f: f.weight_hash_interval and not c.untouched("param"),
    f"--pipeline-model-parallel-size = {{facts.pipeline}} | --param-sync-interval, --replica-check repair | {_COPIES}",
    _copied,
)
