"""Refusals of islands (docs/islands.md)."""

from __future__ import annotations

from collections.abc import Callable

from ...config import LossyConfig
from ...config.facts import Facts
from ...config.refusal import Section
from ...config.refusals.row import ONE_EMBEDDING, Row, above, draws_losses

_FOLDER = "each island has a folder of its own; give the arguments again"


def _averaging(when: Callable[[LossyConfig, Facts], object]) -> Callable[[LossyConfig, Facts], bool]:
    """A condition on islands that are not one data-parallel group."""
    return lambda config, facts: bool(config.averages and when(config, facts))


def _real(when: Callable[[LossyConfig, Facts], object]) -> Callable[[LossyConfig, Facts], bool]:
    """A condition on islands of real ranks."""
    return lambda config, facts: bool(config.averages and facts.virtual is False and when(config, facts))


def _switch(flag: str, why: str) -> Row:
    """The refusal of a switch of Megatron with islands."""

    def when(config: LossyConfig, facts: Facts) -> bool:
        return config.averages and flag in facts.switches

    return Row(flag=flag, beside="--islands", why=f"cannot go with --islands ({why}); turn it off", when=when)


def _workers(config: LossyConfig, facts: Facts) -> dict[str, object]:
    if facts.virtual:
        return {"workers": f"{facts.workers} virtual workers"}
    more = "" if above(facts.workers, config.islands) else "; start more with torchrun, or give --virtual-workers"
    return {"workers": f"{facts.workers} data-parallel rank{'s'[: facts.workers != 1]}{more}"}


def _one_worker_each(config: LossyConfig, facts: Facts) -> bool:
    """Whether losses within islands are asked for although an island has one worker, which exchanges nothing."""
    loses_own = config.lossy_self and not config.phase("grad").lossless
    return config.transport != "udp" and facts.workers == config.islands and draws_losses(config) and not loses_own


def _steps(config: LossyConfig, facts: Facts) -> int | None:
    """Iterations of the slowest island, if known."""
    return None if facts.train_iters is None else config.iterations(facts.train_iters)


def _length(config: LossyConfig, facts: Facts) -> dict[str, object]:
    steps = _steps(config, facts) or 0
    return {"steps": steps, "latest": steps - config.sync_interval}


def _too_short(config: LossyConfig, facts: Facts, needed: int) -> bool:
    """Whether the run is known to have fewer than ``needed`` iterations, so that no mean is used."""
    steps = _steps(config, facts)
    return config.sync_method != "none" and steps is not None and needed > steps


def _bound(config: LossyConfig) -> float:
    from .correction import stability_bound  # which imports torch

    return stability_bound(config)


def _stability(config: LossyConfig, facts: Facts) -> dict[str, object]:
    from .advice import under_way

    return {"bound": f"{_bound(config):.3g}", "under_way": under_way(config)}


def _corrects(config: LossyConfig, correction: str) -> bool:
    """Whether islands average parameters with ``correction``."""
    return config.averages and config.sync_method == "parameters" and config.delay_correction == correction


def _replacing(config: LossyConfig) -> str:
    """The flag with which weights become the rounded mean, or its outer weights; empty if there is none."""
    if config.has_outer_optimizer:
        return f"--sync-method {config.sync_method}"
    return "--delay-correction none" if _corrects(config, "none") else ""


ISLANDS = Section(
    "islands",
    "Islands",
    (
        Row(
            flag=(
                "--param-send",
                "--drift-interval",
                "--p-act",
                "--p-act-grad",
                "--lossy-links",
                "--grad-error",
                "--param-sync-interval",
                "--replica-check",
                "--allow-divergence",
            ),
            beside="--islands",
            why="cannot be combined with --islands",
            when=lambda config, facts: config.averages,
        ),
        Row(
            flag="--eval-weights",
            beside="--islands",
            value="owner",
            why="every island has owners; with --islands choose consensus or replica",
            # A folder's flags do not have --rendezvous, which may change; the run's own have.
            when=_averaging(
                lambda config, facts: (
                    config.eval_weights == "owner" and config.rendezvous is None and facts.virtual is not None
                )
            ),
        ),
        Row(
            flag=("--delivery-log", "--trace"),
            beside="--island-speeds",
            why="cannot be combined with --island-speeds: islands would be in different iterations",
            when=_averaging(lambda config, facts: config.island_speeds is not None),
        ),
        Row(
            flag="--islands",
            beside="a program of one's own",
            why="needs a launcher of this package: each island is a world of its own",
            when=_averaging(lambda config, facts: facts.worlds_apart is False),
        ),
        *(
            _switch(flag, why)
            for flag, why in {
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
            }.items()
        ),
        Row(
            flag="--save-consensus",
            beside="no --save",
            why="needs --save",
            when=lambda config, facts: config.save_consensus and facts.saves is False,
        ),
        Row(
            flag="--dataloader-type",
            beside="--islands",
            value="external",
            why="its samples cannot be divided among islands",
            when=_averaging(lambda config, facts: facts.dataloader == "external"),
        ),
        Row(
            flag="--sync-method",
            beside="--save without --save-replicas, of diloco and eager-diloco",
            why="keeps its outer weights in a checkpoint with --save-replicas only; give it too, or leave it and --save out",
            when=_real(lambda config, facts: config.has_outer_optimizer and facts.saves and not config.save_replicas),
        ),
        Row(
            flag="--num-distributed-optimizer-instances",
            beside="--islands",
            value="{facts.optimizer_instances}",
            why="several ranks of an island would send the same; must be 1 with --islands",
            when=_real(lambda config, facts: above(facts.optimizer_instances, 1)),
        ),
        Row(
            flag="--pipeline-model-parallel-size",
            beside="--islands and an embedding on two stages",
            value="{facts.pipeline}",
            why=f"two stages have a copy of the embedding, which --islands would average apart; {ONE_EMBEDDING}",
            when=_real(lambda config, facts: above(facts.pipeline, 1) and facts.copies_embedding),
        ),
        Row(
            flag="--sync-dtype",
            beside="--delay-correction none, and outer optimizers",
            value="int8",
            why="with {replacing} steps smaller than the rounding are lost",
            terms=lambda config, facts: {"replacing": _replacing(config)},
            when=_averaging(lambda config, facts: config.sync_bits and _replacing(config)),
        ),
        Row(
            flag="--sync-dtype",
            beside="--islands and tensor parallelism",
            value="int8",
            why="tensor-parallel copies of a parameter would be rounded apart; choose bf16",
            when=_real(lambda config, facts: config.sync_bits and above(facts.tensor, 1)),
        ),
        Row(
            flag="--transport",
            beside="--islands and tensor parallelism",
            why="tensor-parallel ranks would lose other averages of what all {facts.tensor} have a copy of; choose torch",
            when=_real(lambda config, facts: config.transport == "udp" and above(facts.tensor, 1)),
        ),
        Row(
            flag="--islands",
            beside="no distributed optimizer",
            why="each shards its optimizer; needs --use-distributed-optimizer",
            when=_averaging(lambda config, facts: facts.distributed_optimizer is False),
        ),
        Row(
            flag="--islands",
            beside="a number of workers that they do not divide",
            why="must divide the {workers}",
            terms=_workers,
            when=lambda config, facts: facts.workers is not None and facts.workers % config.islands != 0,
        ),
        Row(
            flag="--island-speeds",
            beside="real ranks",
            why="needs --virtual-workers: real ones have their own",
            when=_real(lambda config, facts: config.island_speeds is not None),
        ),
        Row(
            flag="--island-schedule",
            beside="real ranks",
            why="is for islands in one process (--virtual-workers); islands of real ranks come and go by --rendezvous",
            when=_real(lambda config, facts: config.island_schedule is not None),
        ),
        Row(
            flag="--island-schedule",
            beside="--island-speeds",
            why="cannot be combined with --island-speeds: its iterations would be others on each island",
            when=_averaging(
                lambda config, facts: config.island_schedule is not None and config.island_speeds is not None
            ),
        ),
        Row(
            flag=("--island-keep", "--island-rejoin"),
            beside="neither --island-schedule nor --rendezvous",
            why="needs --island-schedule or --rendezvous",
            # A folder's flags do not have --rendezvous.
            when=_averaging(lambda config, facts: not config.comes_and_goes and facts.virtual is not None),
        ),
        Row(
            flag="--rendezvous",
            beside="PyTorch's FSDP2 or DDP",
            why="needs a training loop that can go on at a later iteration: python -m megatron_lossy.train, or megatron.training",
            when=_averaging(lambda config, facts: config.rendezvous is not None and facts.data_parallel is not None),
        ),
        Row(
            flag="--rendezvous",
            beside="--virtual-workers",
            why="is for real ranks: islands in one process come and go by --island-schedule",
            when=_averaging(lambda config, facts: config.rendezvous is not None and facts.virtual),
        ),
        Row(
            flag="--save",
            beside="--rendezvous without --save-replicas",
            why="keeps who is there, and who listens, with --save-replicas only; give it too, or leave --save out",
            when=_real(
                lambda config, facts: config.rendezvous is not None and facts.saves and not config.save_replicas
            ),
        ),
        Row(
            flag="--rendezvous",
            beside="--async-pipeline",
            why="cannot go with --async-pipeline: batches under way belong to iterations that others may have left behind",
            when=_averaging(lambda config, facts: config.rendezvous is not None and config.holds_samples()),
        ),
        Row(
            flag=("--trace", "--island-speeds"),
            beside="--rendezvous",
            why="cannot go with --rendezvous: islands have nothing in common that is written or read",
            when=_averaging(lambda config, facts: config.rendezvous is not None),
        ),
        Row(
            flag=("--delivery-log", "--trace"),
            beside="--island-schedule and --loss-unit packet",
            why="cannot go with --island-schedule and --loss-unit packet: the number of packets follows that of the islands; "
            "choose another unit",
            when=_averaging(lambda config, facts: config.island_schedule is not None and config.loss_unit == "packet"),
        ),
        Row(
            flag="--sync-subset",
            beside="Gaudi (HPU)",
            why="draws other elements in each round, and Gaudi would compile as many graphs; choose cyclic",
            when=_averaging(
                lambda config, facts: (
                    facts.device == "hpu"
                    and config.sync_method != "none"
                    and config.sync_fraction < 1
                    and config.sync_subset != "cyclic"
                )
            ),
        ),
        Row(
            flag="--sync-subset",
            beside="--transport udp",
            why="cannot go with --transport udp, whose messages have one length",
            when=_real(lambda config, facts: config.transport == "udp" and config.sync_subset == "bernoulli"),
        ),
        Row(
            flag="--delivery-log",
            beside="--islands and --transport udp",
            why="cannot go with --islands and --transport udp, which knows what arrived iterations later",
            # The log of islands that are launches of their own is of epochs alone.
            when=_real(
                lambda config, facts: (
                    config.transport == "udp" and config.delivery_log is not None and config.rendezvous is None
                )
            ),
        ),
        Row(
            flag="--sync-method",
            beside="exchanges that can be lost, of eager-diloco",
            why="cannot lose exchanges (--p-sync, traces, --transport udp): nothing would pull islands together again; "
            "choose diloco",
            when=_averaging(
                lambda config, facts: (
                    facts.workers is not None and config.sync_method == "eager-diloco" and not config.sync_lossless
                )
            ),
        ),
        Row(
            flag="--islands",
            beside="one worker each, and lost gradients or parameters",
            why="islands of one worker exchange no gradients and no parameters; choose fewer, or --p-sync for what "
            "they average",
            when=_averaging(_one_worker_each),
        ),
        Row(
            flag="--train-iters",
            beside="--island-speeds",
            value="{facts.train_iters}",
            why="leaves the slowest island without an iteration",
            when=_averaging(lambda config, facts: _steps(config, facts) == 0),
        ),
        Row(
            flag="--sync-interval",
            beside="fewer iterations",
            why="must be at most {steps}, the iterations of the run",
            terms=_length,
            when=_averaging(lambda config, facts: _too_short(config, facts, config.sync_interval)),
        ),
        Row(
            flag="--sync-delay",
            beside="fewer iterations",
            why="must be at most {latest}, for the first mean to be used in a run of {steps} iterations",
            terms=_length,
            when=_averaging(lambda config, facts: _too_short(config, facts, config.sync_interval + config.sync_delay)),
        ),
        Row(
            flag="--ema-coefficient",
            beside="a run of unknown length",
            why="falls until --train-iters, which is not known (--train-samples?); give that, or the same number twice",
            when=lambda config, facts: (
                facts.ends is False
                and _corrects(config, "ema")
                and config.ema_coefficient[0] != config.ema_coefficient[1]
            ),
        ),
        Row(
            flag="--ema-coefficient",
            beside="a delay with which it diverges",
            why="diverges: must be below {bound} with {under_way}",
            terms=_stability,
            when=lambda config, facts: (
                facts.workers is not None and _corrects(config, "ema") and config.ema_coefficient[0] >= _bound(config)
            ),
        ),
        Row(
            flag="--mixing-gain",
            beside="a delay with which it diverges",
            why="diverges: must be below {bound} with {under_way}",
            terms=_stability,
            when=lambda config, facts: (
                facts.workers is not None
                and _corrects(config, "mixing")
                and config.gain is not None
                and config.gain >= _bound(config)
            ),
        ),
    ),
)
