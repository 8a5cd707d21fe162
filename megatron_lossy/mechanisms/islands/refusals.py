"""Refusals of islands (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.core import ONE_EMBEDDING, above, draws_losses, switches
from . import under_way

_FOLDER = "each island has a folder of its own; give the arguments again"


def _real(config: LossyConfig, facts: Facts) -> bool:
    """Return whether there are islands of real ranks that are not one data-parallel group."""
    return config.averages and facts.virtual is False


def _cannot_divide(config: LossyConfig, facts: Facts) -> Mapping[str, str] | None:
    """Return the number of workers, if islands do not divide it."""
    if facts.workers is None or facts.workers % config.islands == 0:
        return None
    if facts.virtual:
        return {"workers": f"{facts.workers} virtual workers"}
    more = "" if facts.workers > config.islands else "; start more with torchrun, or give --virtual-workers"
    return {"workers": f"{facts.workers} data-parallel rank{'s'[: facts.workers != 1]}{more}"}


def _one_worker_each(config: LossyConfig, facts: Facts) -> bool:
    """Return whether losses within islands are asked for although an island has one worker, which exchanges nothing."""
    loses_own = config.lossy_self and not config.phase("grad").lossless
    return not config.observed and facts.workers == config.islands and draws_losses(config) and not loses_own


def _has_fewer_ranks(config: LossyConfig, facts: Facts) -> Mapping[str, int] | None:
    """Return the ranks of this island, if they are fewer than those that are to exchange."""
    if facts.workers is None or config.sync_ranks is None or facts.workers // config.islands >= config.sync_ranks:
        return None
    return {"ranks": facts.workers // config.islands}


def _steps(config: LossyConfig, facts: Facts) -> int | None:
    """Return iterations of the slowest island, if known."""
    return None if facts.train_iters is None else config.iterations(facts.train_iters)


def _too_short(config: LossyConfig, facts: Facts, needed: int) -> Mapping[str, int] | None:
    """Return the length of the run, if it has fewer than ``needed`` iterations, so that no mean is used."""
    steps = _steps(config, facts)
    if config.sync_method == "none" or steps is None or needed <= steps:
        return None
    return {"steps": steps, "latest": steps - config.sync_interval}


def _diverges(config: LossyConfig, gain: float | None) -> Mapping[str, Any] | None:
    """Return the bound of the stability of ``gain``, and its exchanges, if ``gain`` is not below it."""
    from .rules import stability_bound  # which imports torch

    if gain is None or gain < (bound := stability_bound(config)):
        return None
    return {"bound": f"{bound:.3g}", "under_way": under_way(config)}


def _corrects(config: LossyConfig, correction: str) -> bool:
    """Return whether islands average parameters with ``correction``."""
    return config.averages and config.sync_method == "parameters" and config.correction == correction


# IslandFlags.check refuses most flags of islands without several of these: conditions on such flags need not ask for islands.
ISLANDS = Section(
    "islands",
    "Islands",
    "--param-send, --drift-interval, --p-act, --p-act-grad, --lossy-links, --grad-error, "
    "--param-sync-interval, --replica-check | --islands | "
    "cannot be combined with --islands",
    lambda c, f: c.averages,
    "--eval-weights = owner | --islands | every island has owners; with --islands choose consensus or replica",
    # A folder's flags do not have --rendezvous, which may change; the run's own have.
    lambda c, f: f.virtual is not None and c.averages and c.eval_weights == "owner" and c.rendezvous is None,
    "--delivery-log, --trace | --island-speeds | "
    "cannot be combined with --island-speeds: islands would be in different iterations",
    lambda c, f: c.island_speeds is not None,
    "--islands | a program of one's own | needs a launcher of this package: each island is a world of its own",
    lambda c, f: f.worlds_apart is False and c.averages,
    *switches(
        "--islands | cannot go with --islands ({why}); turn it off",
        lambda c: c.averages,
        {
            "--use-checkpoint-args": _FOLDER,
            "--use-mp-args-from-checkpoint-args": _FOLDER,
            "--fp8-param-gather": "weights of 8 bits cannot be averaged",
            "--exit-duration-in-mins": "islands would stop after different iterations; choose --exit-interval",
            "--use-precision-aware-optimizer": "its weights in float32 are its own",
            "--optimizer-cpu-offload": "its weights are elsewhere",
            "--overlap-param-gather-with-optimizer-step": "weights are gathered before they are averaged",
            "--hybrid-context-parallel": "its samples cannot be divided among islands",
            "--moe-router-enable-expert-bias": "islands would balance their experts apart",
            "--phase-transition-iterations": "samples of a phase cannot be divided among islands",
        },
    ),
    "--save-consensus | no --save | needs --save",
    lambda c, f: f.saves is False and c.save_consensus,
    "--dataloader-type = external | --islands | its samples cannot be divided among islands",
    lambda c, f: f.dataloader == "external" and c.averages,
    "--sync-method | --save without --save-replicas, of diloco and eager-diloco | "
    "keeps its outer weights in a checkpoint with --save-replicas only; give it too, or leave it and --save out",
    lambda c, f: f.saves and _real(c, f) and c.has_outer_optimizer and not c.save_replicas,
    "--num-distributed-optimizer-instances = {facts.optimizer_instances} | --islands | "
    "several ranks of an island would send the same; must be 1 with --islands",
    lambda c, f: _real(c, f) and above(f.optimizer_instances, 1),
    f"--pipeline-model-parallel-size = {{facts.pipeline}} | --islands and an embedding on two stages | "
    f"two stages have a copy of the embedding, which --islands would average apart; {ONE_EMBEDDING}",
    lambda c, f: f.copies_embedding and _real(c, f) and above(f.pipeline, 1),
    "--sync-dtype | --delay-correction none, and eager-diloco | "
    "loses steps smaller than the rounding with --delay-correction none and eager-diloco; choose mixing, or diloco",
    lambda c, f: c.sync_bits and (c.sync_method == "eager-diloco" or _corrects(c, "none")),
    "--sync-dtype | int4, and a --sync-method other than diloco | is too coarse for weights, which --sync-method {config.sync_method} "
    "sends; choose int8, or diloco, which sends differences",
    lambda c, f: c.averages and c.sync_dtype == "int4" and c.sync_method != "diloco",
    "--sync-dtype | --islands, diloco in int8 or int4, and tensor parallelism | "
    "cannot go with tensor parallelism, whose copies of a parameter would be rounded apart; choose fp32 or bf16",
    lambda c, f: _real(c, f) and c.sends_distances and above(f.tensor, 1),
    "--rendezvous, --transport, --sync-dtype | --islands, experts and tensor parallelism | "
    "tensor-parallel ranks would lose or round other averages of what all {facts.tensor} have a copy of, which experts do not say",
    lambda c, f: (
        _real(c, f)
        and (c.rendezvous is not None or c.observed or c.sync_bits)
        and above(f.experts, 0)
        and above(f.tensor, 1)
    ),
    "--islands | DistributedDataParallel | averages the shards of an optimizer; shard the model with fully_shard",
    lambda c, f: f.data_parallel == "DDP" and c.averages,
    "--islands | no distributed optimizer | each shards its optimizer; needs --use-distributed-optimizer",
    lambda c, f: f.distributed_optimizer is False and c.averages,
    "--islands | a number of workers that they do not divide | must divide the {workers}",
    _cannot_divide,
    "--island-speeds | real ranks | needs --virtual-workers: real ones have their own",
    lambda c, f: _real(c, f) and c.island_speeds is not None,
    "--island-schedule | real ranks | "
    "is for islands in one process (--virtual-workers); islands of real ranks come and go by --rendezvous",
    lambda c, f: _real(c, f) and c.island_schedule is not None,
    "--island-schedule | --island-speeds | "
    "cannot be combined with --island-speeds: its iterations would be others on each island",
    lambda c, f: c.island_schedule is not None and c.island_speeds is not None,
    "--island-keep, --island-rejoin | neither --island-schedule nor --rendezvous | "
    "needs --island-schedule or --rendezvous",
    # A folder's flags do not have --rendezvous.
    lambda c, f: f.virtual is not None and c.averages and c.island_schedule is None and c.rendezvous is None,
    "--rendezvous | --virtual-workers | is for real ranks: islands in one process come and go by --island-schedule",
    lambda c, f: f.virtual and c.rendezvous is not None,
    "--save | --rendezvous without --save-replicas | "
    "keeps who is there, and who listens, with --save-replicas only; give it too, or leave --save out",
    lambda c, f: f.saves and _real(c, f) and c.rendezvous is not None and not c.save_replicas,
    "--rendezvous | --async-pipeline | "
    "cannot go with --async-pipeline: batches under way belong to iterations that others may have left behind",
    lambda c, f: c.rendezvous is not None and c.holds_samples(),
    "--sync-ranks | a loop of Megatron-LM | needs python -m megatron_lossy.train, whose samples do not depend on the numbers of ranks",
    lambda c, f: f.flushes and c.sync_ranks is not None,
    "--sync-ranks | tensor or pipeline parallelism, or experts | needs ranks that are whole replicas: no tensor or pipeline parallelism, "
    "and no experts",
    lambda c, f: c.sync_ranks is not None and (above(f.tensor, 1) or above(f.pipeline, 1) or above(f.experts, 0)),
    "--sync-ranks | an island of fewer ranks | must be at most {ranks}, the ranks of this island",
    _has_fewer_ranks,
    "--sync-ranks | --save-consensus, and --eval-weights consensus or both | "
    "cannot go with --save-consensus and --eval-weights {config.eval_weights}: shards of unequal islands have no mean; evaluate owner",
    lambda c, f: c.sync_ranks is not None and (c.save_consensus or c.eval_weights in ("consensus", "both")),
    "--trace, --island-speeds | --rendezvous | "
    "cannot go with --rendezvous: islands have nothing in common that is written or read",
    lambda c, f: c.rendezvous is not None,
    "--delivery-log, --trace | --island-schedule and --loss-unit packet | "
    "cannot go with --island-schedule and --loss-unit packet: the number "
    "of packets follows that of the islands; choose another unit",
    lambda c, f: c.island_schedule is not None and c.loss_unit == "packet",
    "--sync-subset | Gaudi (HPU) | "
    "draws other elements in each round, and Gaudi would compile as many graphs; choose cyclic",
    lambda c, f: f.device == "hpu" and c.sync_fraction < 1 and c.sync_subset != "cyclic",
    "--sync-subset | --transport udp or stream | cannot go with --transport {config.transport}, whose messages have one length",
    lambda c, f: _real(c, f) and c.observed and c.sync_subset == "bernoulli",
    "--delivery-log | --islands and --transport udp or stream | "
    "cannot go with --islands and --transport {config.transport}, which reports arrivals iterations later",
    # The log of islands that are launches of their own is of epochs alone.
    lambda c, f: _real(c, f) and c.observed and c.delivery_log is not None and c.rendezvous is None,
    "--sync-method | exchanges that can be lost, of eager-diloco | "
    "cannot lose exchanges (--p-sync, traces, --transport udp or stream): "
    "nothing would pull islands together again; choose diloco",
    lambda c, f: c.sync_method == "eager-diloco" and f.workers is not None and not c.sync_lossless,
    "--islands | one worker each, and lost gradients or parameters | "
    "islands of one worker exchange no gradients and no parameters; choose fewer, or --p-sync for what they average",
    lambda c, f: c.averages and _one_worker_each(c, f),
    "--train-iters = {facts.train_iters} | --island-speeds | leaves the slowest island without an iteration",
    lambda c, f: c.averages and _steps(c, f) == 0,
    "--sync-interval | fewer iterations | must be at most {steps}, the iterations of the run",
    lambda c, f: c.averages and _too_short(c, f, c.sync_interval),
    "--sync-delay | fewer iterations | "
    "must be at most {latest}, for the first mean to be used in a run of {steps} iterations",
    lambda c, f: c.averages and _too_short(c, f, c.sync_interval + c.sync_delay),
    "--delay-correction | a run of unknown length | "
    "falls until --train-iters, which is not known (--train-samples?); give that, or the same FIRST and LAST",
    lambda c, f: f.ends is False and _corrects(c, "ema") and c.ema_coefficient[0] != c.ema_coefficient[1],
    "--delay-correction | ema, and a delay with which it diverges | diverges: must be below {bound} with {under_way}",
    lambda c, f: f.workers is not None and _corrects(c, "ema") and _diverges(c, c.ema_coefficient[0]),
    "--delay-correction | mixing, and a delay with which it diverges | diverges: must be below {bound} with {under_way}",
    lambda c, f: f.workers is not None and _corrects(c, "mixing") and _diverges(c, c.gain),
)
