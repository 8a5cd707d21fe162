"""Cost of loss: time of a step with loss over time of the same step of unhooked megatron-core.

    python -m benchmarks.step_overhead [--ranks 4] [--device cpu] [--out benchmarks/results]

Every variant trains the same GPT (at least 20 M parameters, at most 256 tokens per rank and step) in one launch. The
variants take turns, one step each, and the order rotates; the ratio of each is the median over rounds of its time
over the baseline's in the same round. The exchanges alone are timed the same way. Peak extra memory of a gather is
compared with the bytes really lost in it.

The baseline is there twice: its ratio to itself shows the noise of a ratio. A part of that is where in memory a variant
happens to lie; --launches starts all processes anew, and joins the rounds.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import RESULTS, heading, run_ranks
from megatron_lossy.base import device
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.islands.world import IslandWorld

BASELINE = "megatron-core"
#: A second model of the baseline.
AGAIN = "megatron-core again"
#: Variant: loss flags; None is unhooked megatron-core.
VARIANTS: dict[str, dict | None] = {
    BASELINE: None,
    AGAIN: None,
    "shard": {"loss_unit": "shard"},
    "bucket": {"loss_unit": "bucket"},
    "packet 4 KiB": {"loss_unit": "packet", "packet_bytes": 4096},
    "packet 4 KiB, compensated": {"loss_unit": "packet", "packet_bytes": 4096, "param_send": "compensated"},
    "packet 4 KiB, error feedback": {"loss_unit": "packet", "packet_bytes": 4096, "grad_recovery": "error-feedback"},
    "packet 4 KiB, two sites": {"loss_unit": "packet", "packet_bytes": 4096, "sites": 2},
}
#: Variants that are also compared with another one than the first.
AGAINST = {"packet 4 KiB, compensated": "packet 4 KiB", "packet 4 KiB, error feedback": "packet 4 KiB"}


@dataclass(frozen=True)
class Settings:
    """The model and the exchange that are timed."""

    layers: int = 6
    hidden: int = 512
    vocab: int = 8192
    sequence: int = 128
    micro_batch: int = 2
    p: float = 0.1
    rounds: int = 24
    bf16: bool = False
    overlap: bool = False
    distributed: bool = True
    instances: int = 1

    @property
    def tokens(self) -> int:
        """Tokens per rank and step."""
        return self.sequence * self.micro_batch


class TimedVariant:
    """A variant whose steps are timed."""

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds that ``work`` takes, from a barrier to the last rank's end."""
        self.barrier()
        start = time.perf_counter()
        work()
        self.barrier()
        return time.perf_counter() - start

    def barrier(self) -> None:
        """Let all ranks come here, with all work of their devices done."""
        if device.device_type() == "cuda":
            torch.cuda.synchronize()
        dist.barrier()


class Trainer(TimedVariant):
    """One variant: a model, its optimizer and, with a configuration, the hooks, which are in only while it runs."""

    def __init__(self, settings: Settings, config: LossyConfig | None, world: IslandWorld | None = None) -> None:
        from megatron_lossy import hooks

        self._settings = settings
        self.lossy = None if config is None else hooks.install(config, world=world)
        self.model, self.optimizer = _build(settings)
        self._pause()
        self.iteration = 0

    def _pause(self) -> None:
        """Take the patches out, and let everything else stay open."""
        if self.lossy is not None:
            self.lossy.ledger.uninstall()
            self.lossy.installed = False

    def _resume(self) -> None:
        """Install the same runtime again: its buckets stay registered."""
        if self.lossy is not None:
            from megatron_lossy.hooks import megatron_core

            self.lossy.ledger.install(megatron_core.patches(self.lossy))

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds that ``work`` takes with this variant's hooks."""
        self._resume()
        try:
            return super().timed(work)
        finally:
            self._pause()

    def step(self) -> None:
        """Forward, backward, exchange, update."""
        settings = self._settings
        generator = torch.Generator().manual_seed(1000 * self.iteration + dist.get_rank())
        text = torch.randint(settings.vocab, (settings.micro_batch, settings.sequence + 1), generator=generator)
        text = text.to(device.current_device())
        positions = torch.arange(settings.sequence, device=text.device).expand(settings.micro_batch, -1)
        mask = torch.ones(1, 1, settings.sequence, settings.sequence, dtype=torch.bool, device=text.device).triu(1)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        losses = self.model(text[:, :-1].contiguous(), positions, mask, labels=text[:, 1:].contiguous())
        losses.float().mean().backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        self.iteration += 1

    def exchange(self) -> None:
        """Do the reduce-scatter of all gradients and the all-gather of all parameters, and nothing else."""
        for group in self.model.bucket_groups:
            group.is_first_batch = True
        self.model.finish_grad_sync()
        if self.lossy is not None:
            self.lossy.begin_update()
        self.model.start_param_sync(force_sync=True)
        if self.lossy is not None:  # the next exchange must draw anew
            self.lossy.update = self.lossy.iteration
            self.lossy.skip_iteration()


def lossy_config(settings: Settings, flags: dict) -> LossyConfig:
    """Return ``flags`` at the loss rate of ``settings``. A single rank has only its own gradients to lose."""
    alone = dist.get_world_size() == 1
    return LossyConfig(p_grad=settings.p, p_param=0.0 if alone else settings.p, lossy_self=alone, **flags)


def _build(settings: Settings):
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    transformer = TransformerConfig(
        num_layers=settings.layers,
        hidden_size=settings.hidden,
        num_attention_heads=8,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=settings.bf16,
    )
    module = GPTModel(
        transformer,
        get_gpt_layer_local_spec(),
        vocab_size=settings.vocab,
        max_sequence_length=settings.sequence,
        position_embedding_type="rope",
    ).to(device.current_device())
    if settings.bf16:
        module = Float16Module(transformer, module)
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=settings.distributed,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=settings.overlap,
        bucket_size=4_000_000,
        num_distributed_optimizer_instances=settings.instances,
    )
    model = DistributedDataParallel(transformer, ddp_config, module)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-4, use_distributed_optimizer=settings.distributed, bf16=settings.bf16, params_dtype=dtype
        ),
        [model],
        use_gloo_process_groups=False,
    )
    return model, optimizer


def compare(trainers: Mapping[str, Trainer], work: str, rounds: int, warm_up: int = 3) -> dict[str, list[float]]:
    """Return seconds by variant and round, the variants taking turns. ``work``: the method to time."""
    times: dict[str, list[float]] = {name: [] for name in trainers}
    names = list(trainers)
    for turn in range(warm_up + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = trainers[name].timed(getattr(trainers[name], work))
            if turn >= warm_up:
                times[name].append(seconds)
        if os.environ.get("RANK", "0") == "0":  # of all islands, where there are some
            print(f"\r{work}: round {turn + 1} of {warm_up + rounds}", end="", file=sys.stderr, flush=True)
    return times


def ratios(times: Mapping[str, list[float]]) -> dict[str, dict[str, float]]:
    """Return :func:`ratio` of each variant to the first."""
    first = next(iter(times.values()))
    return {name: ratio(seconds, first) for name, seconds in times.items()}


def ratio(mine: list[float], others: list[float]) -> dict[str, float]:
    """Return median seconds, and median and quartiles of the ratio round by round."""
    ratios = sorted(own / base for own, base in zip(mine, others, strict=True))
    quarter = len(ratios) // 4
    return {
        "seconds": statistics.median(mine),
        "ratio": statistics.median(ratios),
        "ratio of the medians": statistics.median(mine) / statistics.median(others),
        "lower quartile": ratios[quarter],
        "upper quartile": ratios[-1 - quarter],
    }


def gather_memory(trainer: Trainer) -> dict[str, float] | None:
    """Return bytes put aside during one gather of all buckets, and bytes really lost in it."""
    if trainer.lossy is None or dist.get_world_size() == 1:
        return None
    from megatron_lossy.hooks.seam import slot_of
    from megatron_lossy.recovery import rows_for

    kept = lost_bytes = 0
    for group in trainer.model.bucket_groups:
        for bucket in group.buckets:
            slot = slot_of(bucket.param_data)
            rule = slot.group.params[slot.bucket]
            units, lost = rule.units, slot.group.delivery("param", trainer.lossy.update).lost_here(rule.units)
            whole, tail = lost.mask[:, : units.whole].sum(), lost.mask[:, units.whole :].sum()
            lost_bytes += int(whole * units.elements + tail * units.tail) * bucket.param_data.element_size()
            for parts in rows_for(bucket.param_data.device).take(bucket.param_data, units, lost):
                kept += sum(part.numel() * part.element_size() for part in parts)
    return {"bytes kept": kept, "bytes lost": lost_bytes, "ratio": kept / lost_bytes if lost_bytes else 1.0}


def run(settings: Settings) -> dict:
    """Run everything on every rank; the result of rank 0 counts."""
    trainers = {
        name: Trainer(settings, None if flags is None else lossy_config(settings, flags))
        for name, flags in VARIANTS.items()
        if not dist.get_world_size() % (flags or {}).get("sites", 1)
    }
    times = {work: compare(trainers, work, settings.rounds) for work in ("step", "exchange")}
    memory = {name: gather_memory(trainer) for name, trainer in trainers.items()}
    parameters = sum(parameter.numel() for parameter in trainers[BASELINE].model.parameters())
    return {
        "command": "python -m benchmarks.step_overhead " + " ".join(sys.argv[1:]),
        "settings": asdict(settings),
        "tokens per rank and step": settings.tokens,
        "parameters": parameters,
        "times": times,
        "memory of one gather": memory,
    }


def spread(part: dict[str, float]) -> str:
    """Return a ratio with its quartiles."""
    return f"{part['ratio']:.3f} ({part['lower quartile']:.3f} to {part['upper quartile']:.3f})"


def table(result: dict) -> str:
    """Return the result as Markdown."""
    what = (
        f"{result['ranks']} ranks, {result['tokens per rank and step']} tokens per rank and step, "
        f"p = {result['settings']['p']}, {turns(result)}"
    )
    times = result["times"]
    steps, exchanges, memories = ratios(times["step"]), ratios(times["exchange"]), result["memory of one gather"]
    lines = [
        *heading("Overhead of loss", result, what),
        "| variant | step, s | step, ratio (quartiles) | exchanges alone, s | ratio (quartiles) | kept / lost bytes of a gather |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, memory in memories.items():
        cells = [name]
        for part in (steps[name], exchanges[name]):
            cells.append(f"{part['seconds']:.3f}")
            cells.append(spread(part))
        cells.append(f"{memory['ratio']:.4f}" if memory else "")
        lines.append("| " + " | ".join(cells) + " |")
    for name, other in AGAINST.items():
        over = ratio(times["step"][name], times["step"][other])
        lines += ["", f"A step of {name!r} over one of {other!r}: {spread(over)}."]
    return "\n".join(lines) + "\n"


def turns(result: dict[str, Any]) -> str:
    """Return the number of turns of every variant, for a sentence."""
    count, launches = result["settings"]["rounds"], result["launches"]
    return f"{count} rounds" if launches == 1 else f"{launches} launches of {count} rounds"


def program(
    module: Any, kind: type[Settings], *names: str, ranks: int = 4, least: int = 2, rounds: int | None = None
) -> None:
    """Run ``module``, a benchmark whose ``run`` takes a ``kind``, and write its ``table``.

    It has ``--rounds``, ``--launches``, ``--out`` and a flag for each of ``names``, fields of ``kind``; and ``--ranks``, ``least`` or more,
    unless ``--islands`` of a rank each stand for them.
    """
    name = module.__spec__.name.rpartition(".")[2]
    parser = argparse.ArgumentParser(description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in ("rounds", *names):
        default = getattr(kind, field)
        options: dict[str, Any] = {"action": "store_true"} if isinstance(default, bool) else {"type": int}
        parser.add_argument(f"--{field}", default=default, **options)
    own = "islands" not in names
    if own:
        parser.add_argument("--ranks", type=int, default=ranks)
    if rounds is not None:
        parser.set_defaults(rounds=rounds)
    parser.add_argument(
        "--launches", type=int, default=1, help="how often to start all ranks, with so many rounds each"
    )
    parser.add_argument("--out", default=RESULTS)
    arguments = parser.parse_args()
    with usage_errors(name):
        for field, value in vars(arguments).items():
            needed = least if field in ("ranks", "islands") else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < needed:
                raise refuse(f"--{field}", value, f"must be at least {needed}")
        if arguments.rounds * arguments.launches < 4:
            raise refuse("--rounds", arguments.rounds, "must be at least 4 in all launches, for quartiles")
    settings = kind(**{field.name: getattr(arguments, field.name) for field in fields(kind) if field.name in arguments})
    count, islands = (arguments.ranks, 1) if own else (arguments.islands, arguments.islands)
    run_ranks(count, module.run, settings, module.table, name, arguments.out, islands, arguments.launches)


if __name__ == "__main__":
    program(sys.modules[__name__], Settings, "layers", "hidden", "bf16", "overlap", least=1)
