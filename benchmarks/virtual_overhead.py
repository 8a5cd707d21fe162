"""What virtual workers cost: time per step over plain gradient accumulation of the same global batch, and memory.

    python -m benchmarks.virtual_overhead [--workers 64] [--rounds 5] [--growth 1 4 16 64 256 1024] [--out DIR]

Overhead: a model of at least 20 M parameters, trained in one process on the same batches by megatron-core with gradient
accumulation, and by a virtual cluster that loses 10 % of both exchanges. They take turns, a step each, in alternating order;
the ratio is the median over rounds. Memory: the most that weights took while a small model was trained, in copies of the
model, per unit of loss. Growth: the small model with 1 to 1,024 workers, a micro-batch each.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Callable

import torch

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.step_overhead import compare, ratios, spread
from megatron_lossy.base import device
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.config import TrainConfig

P = 0.1
LOSSY = LossyConfig(p_grad=P, p_param=P)
PACKETS = dataclasses.replace(LOSSY, loss_unit="packet", packet_bytes=256)
VOCABULARY = 2048
LARGE = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512}
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 32}
# Steps of the small model after which memory no longer grows.
STEPS = 40
PLAIN, VIRTUAL = "plain accumulation", "virtual workers"


class RandomText:
    """Samples of random tokens, each a function of its index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.randint(VOCABULARY, (self._length + 1,), generator=torch.Generator().manual_seed(index))
        places = torch.arange(self._length)
        return {"tokens": text[:-1], "labels": text[1:], "position_ids": places, "loss_mask": torch.ones(self._length)}


class Run:
    """A model in training: plain (``lossy`` is None), or on a virtual cluster of ``workers``."""

    def __init__(self, shape: dict[str, int], workers: int, lossy: LossyConfig | None) -> None:
        from megatron_lossy.hooks.runtime import Lossy
        from megatron_lossy.lab.train.model import build_model
        from megatron_lossy.lab.train.workers import Workers
        from megatron_lossy.lab.virtual import VirtualCluster

        self.config = _config(shape, workers, virtual_workers=workers if lossy else None)
        self.cluster = VirtualCluster(lossy, workers) if lossy else None
        run = self.cluster or Lossy(LossyConfig())
        with run.building():
            self.model = build_model(self.config, VOCABULARY)
        run.attach(self.model[0])
        self._workers = Workers(self.config, self.model, run)
        self._batches = self._workers.batches(RandomText(self.config.seq_length), consumed=0)

    def step(self) -> None:
        """Train one iteration."""
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._workers.optimizer.zero_grad()
        self._workers.run(self._batches, self.config.global_batch_size, forward_only=False)
        self._workers.step()

    @staticmethod
    def timed(work: Callable[[], None]) -> float:
        """Return the seconds that ``work`` takes."""
        _synchronize()
        started = time.perf_counter()
        work()
        _synchronize()
        return time.perf_counter() - started

    @property
    def parameters(self) -> str:
        """Their number, for a sentence."""
        return f"{sum(parameter.numel() for parameter in self.model[0].parameters()) / 1e6:.2f} M parameters"


def _config(shape: dict[str, int], samples: int, **more: int | None) -> TrainConfig:
    sizes = {"micro_batch_size": 1, "global_batch_size": samples, "train_iters": 1000, "lr": 1e-4, "eval_iters": 0}
    return TrainConfig(**shape, **sizes, data_path=("random",), **more)


def _synchronize() -> None:
    if device.device_type() == "cuda":
        torch.cuda.synchronize()


def overhead(workers: int, rounds: int) -> list[str]:
    """Return the table of the large model."""
    runs = {PLAIN: Run(LARGE, workers, None), VIRTUAL: Run(LARGE, workers, LOSSY)}
    size = f"{runs[PLAIN].parameters}, {workers} workers, {LARGE['seq_length']} tokens per worker and step"
    found = ratios(compare(runs, "step", rounds, warm_up=2))
    return [
        f"{size}, p = {P}, unit shard, {rounds} rounds.",
        "",
        "| variant | step, s | ratio (quartiles) |",
        "| --- | --- | --- |",
        *(f"| {name} | {part['seconds']:.2f} | {spread(part)} |" for name, part in found.items()),
    ]


def memory(workers: int) -> list[str]:
    """Return the table of the memory of weights, by unit of loss."""
    rows = []
    for name, config in (("shard", LOSSY), ("packet of 256 bytes", PACKETS)):
        run = Run(SMALL, workers, config)
        for _ in range(STEPS):
            run.step()
        rows.append(f"| {name} | {run.cluster.weight_copies:.2f} |")
    what = f"{run.parameters}, {workers} workers, p = {P}, {STEPS} steps; the working copy is included."
    return [what, "", "| unit | most copies of the model |", "| --- | --- |", *rows]


def growth(counts: list[int]) -> list[str]:
    """Return a table with a row per number of workers."""
    rows = []
    for workers in counts:
        runs = {PLAIN: Run(SMALL, workers, None), VIRTUAL: Run(SMALL, workers, LOSSY)}
        # Memory has a steady state when the oldest ages have been reached.
        for _ in range(4):
            runs[VIRTUAL].step()
        rounds = max(3, min(32, 256 // workers))  # the shorter a step, the more it varies
        part, copies = ratios(compare(runs, "step", rounds, warm_up=1))[VIRTUAL], runs[VIRTUAL].cluster.weight_copies
        each = f"{part['seconds']:.2f} | {1e3 * part['seconds'] / workers:.1f} | {part['ratio']:.3f}"
        rows.append(f"| {workers} | {each} | {copies:.2f} |")
        size = runs[PLAIN].parameters
        del runs
        gc.collect()
    return [
        f"{size}, {SMALL['seq_length']} tokens per worker and step, unit shard, p = {P}.",
        "",
        "| workers | step, s | per worker, ms | ratio to plain accumulation | weights, copies of the model |",
        "| --- | --- | --- | --- | --- |",
        *rows,
    ]


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64, help="of the large model")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant")
    parser.add_argument("--growth", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], metavar="N")
    parser.add_argument("--out", default=RESULTS)
    arguments = parser.parse_args()
    with usage_errors("virtual_overhead"):
        if arguments.workers < 2:
            raise refuse("--workers", arguments.workers, "must be at least 2")
        if arguments.rounds < 4:
            raise refuse("--rounds", arguments.rounds, "must be at least 4, for quartiles")
    device.prepare()
    from megatron_lossy.lab.train import parallel

    config = _config(SMALL, 1)
    with parallel.world(config), parallel.model_parallel(config):
        parts = {"Overhead": overhead(arguments.workers, arguments.rounds)}
        gc.collect()
        parts["Memory of weights"] = memory(arguments.workers)
        parts["Growth"] = growth(arguments.growth)
    lines = ["# Virtual workers", "", *(f"- {line}" for line in made_with("benchmarks.virtual_overhead", sys.argv[1:]))]
    for title, table in parts.items():
        lines += ["", f"## {title}", "", *table]
    text = "\n".join(lines) + "\n"
    print("\n" + text)
    write_results(arguments.out, f"virtual_overhead_{device.device_type()}_{today()}", md=text)


if __name__ == "__main__":
    main()
