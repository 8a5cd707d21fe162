"""Refusals of full replicas, of their errors and of averages that keep them equal (docs/corruption.md)."""

from __future__ import annotations

from collections.abc import Callable

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.row import OFF, ONE_EMBEDDING, Row, above

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


def _apart(config: LossyConfig) -> bool:
    """Whether replicas can differ, and so disagree on an overflow."""
    return (config.drives_apart or config.synchronises) and config.replica_check != "repair"


def _full(when: Callable[[LossyConfig], object]) -> Callable[[LossyConfig, Facts], bool]:
    """A condition on runs without the distributed optimizer."""
    return lambda config, facts: bool(facts.distributed_optimizer is False and when(config))


def _sharded(when: Callable[[LossyConfig], object]) -> Callable[[LossyConfig, Facts], bool]:
    """A condition on runs with the distributed optimizer."""
    return lambda config, facts: bool(facts.distributed_optimizer and when(config))


def _loses_parameters(when: Callable[[LossyConfig], object]) -> Callable[[LossyConfig, Facts], bool]:
    return lambda config, facts: bool(not config.phase("param").lossless and when(config))


def _sums_absolute_noise(config: LossyConfig, facts: Facts) -> bool:
    """Whether gradients are sums over tokens, and the noise in them is not relative."""
    relative = config.error_kind != "gaussian" or config.grad_error_relative is not None
    return bool(facts.per_token_loss and not config.inert and not relative)


def _scale(config: LossyConfig, facts: Facts) -> dict[str, object]:
    return {"scale": "on" if facts.loss_scale is None else f"with --loss-scale {facts.loss_scale:g}"}


def _copied(config: LossyConfig, facts: Facts) -> bool:
    """Whether averages on different stages would make the copies of an embedding differ.

    Each stage adds up its own copy, among other parameters. Sums of more than two replicas round differently there.
    """
    averages = config.synchronises or config.replica_check == "repair"
    return averages and above(facts.workers, 2) and above(facts.pipeline, 1) and facts.copies_embedding


REPLICAS = Section(
    "replicas",
    "Full replicas, and errors in gradients",
    (
        Row(
            flag="--param-sync-interval",
            beside=_LOST,
            why=_UPDATES,
            when=_loses_parameters(lambda config: config.synchronises),
        ),
        Row(
            flag="--replica-check",
            beside=_LOST,
            why=_UPDATES,
            when=_loses_parameters(lambda config: config.replica_check != "none"),
        ),
        Row(
            flag="--grad-error-at",
            beside=_LOST,
            why=_UPDATES,
            when=_loses_parameters(lambda config: config.errs_apart),
        ),
        Row(
            flag="--grad-error-std",
            beside="--calculate-per-token-loss",
            why=f"{_SUMS}choose --grad-error-relative",
            when=lambda config, facts: config.grad_error_std and _sums_absolute_noise(config, facts),
        ),
        Row(
            flag="--grad-error-burst",
            beside="--calculate-per-token-loss",
            why=f"{_SUMS}choose --grad-error-relative",
            when=_sums_absolute_noise,
        ),
        Row(
            flag="--param-sync-rule",
            beside="--calculate-per-token-loss",
            why=f"{_SUMS}choose divergence",
            when=lambda config, facts: facts.per_token_loss and config.sync_rule[0] == "snr",
        ),
        Row(
            flag="--param-sync-interval",
            beside=_SHARDED,
            why=_GATHERS,
            when=_sharded(lambda config: config.synchronises),
        ),
        Row(
            flag="--replica-check",
            beside=_SHARDED,
            why=f"{_FULL}each gradient is at one rank",
            when=_sharded(lambda config: config.replica_check != "none"),
        ),
        Row(
            flag="--allow-divergence",
            beside=_SHARDED,
            why=_GATHERS,
            when=_sharded(lambda config: config.allow_divergence),
        ),
        Row(
            flag="--grad-error-at",
            beside=_SHARDED,
            why=f"{_FULL}choose reduce: an error of an owner's shard",
            when=_sharded(lambda config: config.errs_apart),
        ),
        Row(
            flag="--p-param",
            beside="no distributed optimizer",
            why=OFF,
            when=_full(lambda config: not config.phase("param").lossless),
        ),
        Row(
            flag="--param-sync-interval",
            beside="fewer --train-iters",
            why="is above --train-iters {facts.train_iters}: replicas would drift apart to the end; or give "
            "--allow-divergence",
            when=lambda config, facts: (
                facts.distributed_optimizer is False
                and facts.train_iters is not None
                and config.param_sync_interval > facts.train_iters
                and not config.allow_divergence
            ),
        ),
        Row(
            flag="--p-grad",
            beside="no distributed optimizer",
            why="drives replicas apart without the distributed optimizer; needs --param-sync-interval or "
            "--allow-divergence",
            when=_full(lambda config: not (config.untouched("grad") or config.synchronises or config.allow_divergence)),
        ),
        Row(
            flag="--fp16",
            beside="replicas that differ",
            value="{scale}",
            why=_OVERFLOWS,
            terms=_scale,
            when=lambda config, facts: facts.distributed_optimizer is False and facts.fp16 and _apart(config),
        ),
        Row(
            flag="--loss-scale",
            beside="replicas that differ",
            value="{facts.loss_scale:g}",
            why=_OVERFLOWS,
            when=lambda config, facts: facts.distributed_optimizer is False and facts.loss_scale and _apart(config),
        ),
        Row(
            flag="--optimizer-cpu-offload",
            beside="full replicas",
            why="replicas are averaged where they are; turn it off",
            when=lambda config, facts: (
                facts.distributed_optimizer is False
                and not config.inert
                and "--optimizer-cpu-offload" in facts.switches
            ),
        ),
        Row(
            flag="--check-weight-hash-across-dp-replicas-interval",
            beside="replicas that differ",
            value="{facts.weight_hash_interval}",
            why="ends runs whose replicas differ; turn it off",
            when=lambda config, facts: (
                facts.distributed_optimizer is False
                and facts.weight_hash_interval
                and config.drives_apart
                and config.replica_check != "repair"
            ),
        ),
        Row(
            flag="--check-weight-hash-across-dp-replicas-interval",
            beside=_LOST,
            value="with parameter loss",
            why="replicas differ on purpose; turn one off",
            when=lambda config, facts: facts.weight_hash_interval and not config.untouched("param"),
        ),
        Row(
            flag="--pipeline-model-parallel-size",
            beside="--param-sync-interval, --replica-check repair",
            value="{facts.pipeline}",
            why=_COPIES,
            terms=lambda config, facts: {
                "what": "--param-sync-interval" if config.synchronises else "--replica-check repair"
            },
            when=_copied,
        ),
    ),
)
