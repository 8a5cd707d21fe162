"""What virtual workers cost: time per step over plain gradient accumulation of the same global batch, and memory.

    python -m benchmarks.virtual_overhead [--workers 64] [--rounds 5] [--growth 1 4 16 64 256 1024] [--out DIR]

Overhead: one model of at least 20 M parameters, trained in one process on the same batches by megatron-core with
gradient accumulation (baseline) and by a virtual cluster that loses 10 % of both exchanges. They take turns, a step
each, in alternating order; the ratio is the median over rounds.

Memory: the most that weights ever took while a small model was trained, in copies of the model, per unit of loss.

Growth: a small model for N from 1 to 1,024 workers, a micro-batch each: time per step and worker, and memory, against
plain accumulation and N copies of the model.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import gc
import io
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, machine, today, version_list, write_results
from megatron_lossy.base import device
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.base.files import replace_file
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.config import TrainConfig

P = 0.1
LOSSY = LossyConfig(p_grad=P, p_param=P)
VOCABULARY = 2048
LARGE = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512}
# Steps of the small model after which memory no longer grows.
STEPS = 40
SMALL = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 2, "seq_length": 32}


class RandomText:
    """Samples of random tokens, each a function of its index."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = torch.randint(VOCABULARY, (self._length + 1,), generator=torch.Generator().manual_seed(index))
        return {
            "tokens": text[:-1],
            "labels": text[1:],
            "position_ids": torch.arange(self._length),
            "loss_mask": torch.ones(self._length),
        }


class Run:
    """A model in training: plain (``lossy`` is None), or on a virtual cluster of ``workers``."""

    def __init__(self, shape: dict[str, int], workers: int, lossy: LossyConfig | None) -> None:
        from megatron_lossy.hooks.runtime import Lossy
        from megatron_lossy.lab.train.model import build_model
        from megatron_lossy.lab.train.workers import Workers
        from megatron_lossy.lab.virtual import VirtualCluster

        self.config = TrainConfig(
            **shape,
            micro_batch_size=1,
            global_batch_size=workers,
            train_iters=1000,
            lr=1e-4,
            data_path=("random",),
            eval_iters=0,
            virtual_workers=workers if lossy else None,
        )
        self.cluster = VirtualCluster(lossy, workers) if lossy else None
        run = self.cluster or Lossy(LossyConfig())
        with run.building():
            self.model = build_model(self.config, VOCABULARY)
        run.attach(self.model[0])
        self._workers = Workers(self.config, self.model, run)
        self._batches = self._workers.batches(RandomText(self.config.seq_length), consumed=0)

    def step(self) -> float:
        """Seconds of one step."""
        _synchronize()
        started = time.perf_counter()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._workers.optimizer.zero_grad()
        self._workers.run(self._batches, self.config.global_batch_size, forward_only=False)
        self._workers.step()
        _synchronize()
        return time.perf_counter() - started

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model[0].parameters())


def _synchronize() -> None:
    if device.device_type() == "cuda":
        torch.cuda.synchronize()


def compare(runs: dict[str, Run], rounds: int, label: str, warm_up: int) -> dict[str, list[float]]:
    """Seconds of each run's steps, the runs taking turns."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(warm_up + rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            seconds = runs[name].step()
            if turn >= warm_up:
                times[name].append(seconds)
        print(f"\r{label}: round {turn + 1} of {warm_up + rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times


def _ratio(times: dict[str, list[float]], name: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile of the ratio to the first run in the same round."""
    baseline = next(iter(times.values()))
    ratios = sorted(mine / base for mine, base in zip(times[name], baseline, strict=True))
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]


def overhead(workers: int, rounds: int) -> str:
    """The Markdown table of the large model."""
    runs = {"plain accumulation": Run(LARGE, workers, None), "virtual workers": Run(LARGE, workers, LOSSY)}
    parameters = runs["virtual workers"].parameters
    times = compare(runs, rounds, f"{workers} workers, {parameters / 1e6:.1f} M parameters", warm_up=2)
    lines = [
        (
            f"{parameters / 1e6:.1f} M parameters, {workers} workers, {LARGE['seq_length']} tokens per worker and step, "
            f"p = {P}, unit shard, {rounds} rounds."
        ),
        "",
        "| variant | step, s | ratio (quartiles) |",
        "| --- | --- | --- |",
    ]
    for name in runs:
        median, lower, upper = _ratio(times, name)
        lines.append(f"| {name} | {statistics.median(times[name]):.2f} | {median:.3f} ({lower:.3f} to {upper:.3f}) |")
    return "\n".join(lines)


def memory(workers: int) -> str:
    """The Markdown table of the memory of weights, by unit of loss."""
    units = {
        "shard": LOSSY,
        "packet of 256 bytes": dataclasses.replace(LOSSY, loss_unit="packet", packet_bytes=256),
    }
    lines = ["| unit | most copies of the model |", "| --- | --- |"]
    for name, config in units.items():
        run = Run(SMALL, workers, config)
        for step in range(STEPS):
            run.step()
            print(f"\r{name}: step {step + 1} of {STEPS}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        lines.append(f"| {name} | {run.cluster.weight_copies:.2f} |")
    return (
        f"{run.parameters / 1e6:.2f} M parameters, {workers} workers, p = {P}, {STEPS} steps; the working copy is "
        "included.\n\n" + "\n".join(lines)
    )


def growth(counts: list[int]) -> list[dict[str, float]]:
    """A row per number of workers: seconds per step, the ratio to plain accumulation, and copies of the weights."""
    rows = []
    for workers in counts:
        runs = {"plain": Run(SMALL, workers, None), "virtual": Run(SMALL, workers, LOSSY)}
        # Memory has a steady state when the oldest ages have been reached.
        for _ in range(4):
            runs["virtual"].step()
        rounds = max(3, min(32, 256 // workers))  # the shorter a step, the more it varies
        times = compare(runs, rounds, f"{workers} workers", warm_up=1)
        rows.append(
            {
                "workers": workers,
                "parameters": runs["virtual"].parameters,
                "step, s": statistics.median(times["virtual"]),
                "plain step, s": statistics.median(times["plain"]),
                "ratio": _ratio(times, "virtual")[0],
                "copies": runs["virtual"].cluster.weight_copies,
            }
        )
        del runs
        gc.collect()
    return rows


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Time and memory against N."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5.2), layout="constrained")
    workers = [row["workers"] for row in rows]
    for key, style, color, label in (
        ("step, s", "o-", "#1f77b4", "virtual workers"),
        ("plain step, s", "s--", "grey", "plain gradient accumulation"),
    ):
        milliseconds = [1e3 * row[key] / row["workers"] for row in rows]
        left.plot(workers, milliseconds, style, color=color, label=label)
    left.set(title="Time per step and worker", ylabel="milliseconds", ylim=(0, None))
    right.plot(workers, [row["copies"] for row in rows], "o-", color="#d62728", label="kept: versions of shards")
    right.plot(workers, workers, "--", color="grey", label="a copy per worker")
    right.set(title="Most memory that weights took", ylabel="copies of the model")
    right.set_yscale("log", base=2)
    right.set_yticks(workers, [str(n) for n in workers])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [str(n) for n in workers])
        axes.set_xlabel("virtual workers")
        axes.grid(alpha=0.35)
        axes.legend()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def main() -> None:
    """Measure all and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64, help="of the large model")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each variant")
    parser.add_argument("--growth", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024], metavar="N")
    parser.add_argument("--out", default=RESULTS)
    arguments = parser.parse_args()
    with usage_errors("virtual_overhead"):
        if arguments.workers < 2:
            raise refuse("--workers", arguments.workers, "must be at least 2")
        if arguments.rounds < 4:
            raise refuse("--rounds", arguments.rounds, "must be at least 4, for quartiles")
        if min(arguments.growth, default=1) < 1:
            raise refuse("--growth", min(arguments.growth), "must be at least 1")
    device.prepare()
    from megatron_lossy.lab.train import parallel

    config = TrainConfig(
        **SMALL, micro_batch_size=1, global_batch_size=1, train_iters=1, lr=1e-4, data_path=("random",), eval_iters=0
    )
    with parallel.world(config), parallel.model_parallel(config):
        large = overhead(arguments.workers, arguments.rounds)
        gc.collect()
        small = memory(arguments.workers)
        rows = growth(arguments.growth)
    _report(arguments, large, small, rows)


def _report(arguments: Any, large: str, small: str, rows: list[dict[str, float]]) -> None:
    name = f"virtual_overhead_{device.device_type()}_{today()}"
    lines = [
        f"# Virtual workers, {today()}",
        "",
        f"`python -m benchmarks.virtual_overhead {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        f"{machine()}. {version_list()}.",
        "",
        "## Overhead",
        "",
        large,
        "",
        "## Memory of weights",
        "",
        small,
    ]
    if rows:
        lines += [
            "",
            "## Growth",
            "",
            (
                f"{rows[-1]['parameters'] / 1e6:.2f} M parameters, {SMALL['seq_length']} tokens per worker and step, "
                f"unit shard, p = {P}."
            ),
            "",
            "| workers | step, s | per worker, ms | ratio to plain accumulation | weights, copies of the model |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {row['workers']} | {row['step, s']:.2f} | {1e3 * row['step, s'] / row['workers']:.1f} | {row['ratio']:.3f} "
                f"| {row['copies']:.2f} |"
                for row in rows
            ),
            "",
            f"![growth]({name}.png)",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    contents = {"md": text}
    if rows:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        contents["csv"] = table.getvalue()
    write_results(arguments.out, name, **contents)
    if rows:
        replace_file(Path(arguments.out) / f"{name}.png", lambda aside: plot(rows, aside))


if __name__ == "__main__":
    main()
