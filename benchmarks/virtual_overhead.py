"""What virtual workers cost: time per step over plain gradient accumulation of the same global batch, and memory.

    python -m benchmarks.virtual_overhead [--workers 64] [--rounds 9] [--growth 1 4 16 64 256 1024] [--out DIR]

Overhead: one model of at least 20 M parameters, trained in one process on the same batches by megatron-core with
gradient accumulation (baseline) and by a virtual cluster that loses 10 % of both exchanges. They take turns, a step
each, in alternating order; the ratio is the median over rounds.

Growth: a small model for N from 1 to 1,024 workers, a micro-batch each: time per step, the part that is not in plain
accumulation, and the most memory that weights ever took, in copies of the model, against what N copies would take.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import gc
import io
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.hardware import processor
from megatron_lossy import __version__, device
from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import refuse, usage_errors
from megatron_lossy.train.config import TrainConfig

P = 0.1
VOCABULARY = 8192
LARGE = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 512}
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
        from megatron_lossy.train.model import build_model
        from megatron_lossy.train.optimizer import build_optimizer
        from megatron_lossy.train.workers import Workers
        from megatron_lossy.virtual import VirtualCluster

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
        with self.cluster.building() if self.cluster else contextlib.nullcontext():
            self.model = build_model(self.config, VOCABULARY)
        if self.cluster:
            self.cluster.attach(self.model[0])
            self._pause()
        self._workers = Workers(self.config, self.model, self.cluster)
        self._optimizer, _ = build_optimizer(self.config, self.model)
        self._batches = self._workers.batches(RandomText(self.config.seq_length), consumed=0)

    def _pause(self) -> None:
        """The cluster's one patch is in only while it runs, so that the baseline is unpatched."""
        self._patches = [patch for patch, *_ in self.cluster._ledger._installed]
        self.cluster._ledger.uninstall()

    def step(self) -> float:
        """Seconds of one step."""
        if self.cluster:
            self.cluster._ledger.install(self._patches)
        _synchronize()
        started = time.perf_counter()
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        self._workers.run(self._batches, self.config.global_batch_size, forward_only=False)
        self._workers.step(self._optimizer)
        _synchronize()
        seconds = time.perf_counter() - started
        if self.cluster:
            self._pause()
        return seconds

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
    variants: dict[str, LossyConfig | None] = {
        "plain accumulation": None,
        "shard": LossyConfig(p_grad=P, p_param=P),
        "packet 4 KiB": LossyConfig(p_grad=P, p_param=P, loss_unit="packet"),
    }
    runs = {name: Run(LARGE, workers, lossy) for name, lossy in variants.items()}
    parameters = runs["shard"].parameters
    times = compare(runs, rounds, f"{workers} workers, {parameters / 1e6:.1f} M parameters", warm_up=2)
    lines = [
        f"{parameters / 1e6:.1f} M parameters, {workers} workers, {LARGE['seq_length']} tokens per worker and step, "
        f"p = {P}, {rounds} rounds.",
        "",
        "| variant | step, s | ratio (quartiles) | weights, copies of the model |",
        "| --- | --- | --- | --- |",
    ]
    for name, run in runs.items():
        median, lower, upper = _ratio(times, name)
        copies = f"{run.cluster.weight_copies:.2f}" if run.cluster else "1"
        seconds = statistics.median(times[name])
        lines.append(f"| {name} | {seconds:.2f} | {median:.3f} ({lower:.3f} to {upper:.3f}) | {copies} |")
    return "\n".join(lines)


def growth(counts: list[int], rounds: int) -> list[dict[str, float]]:
    """A row per number of workers: seconds per step, of which beyond plain accumulation, and copies of the weights."""
    rows = []
    for workers in counts:
        lossy = LossyConfig(p_grad=P, p_param=P if workers > 1 else 0.0)
        runs = {"plain": Run(SMALL, workers, None), "virtual": Run(SMALL, workers, lossy)}
        # Memory has a steady state when the oldest ages have been reached.
        for _ in range(4):
            runs["virtual"].step()
        times = compare(runs, rounds, f"{workers} workers", warm_up=1)
        rows.append(
            {
                "workers": workers,
                "parameters": runs["virtual"].parameters,
                "step, s": statistics.median(times["virtual"]),
                "step per worker, ms": 1e3 * statistics.median(times["virtual"]) / workers,
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
    left.plot(workers, [row["step per worker, ms"] for row in rows], "o-", color="#1f77b4", label="virtual cluster")
    left.plot(
        workers,
        [row["step per worker, ms"] / row["ratio"] for row in rows],
        "s--",
        color="grey",
        label="plain gradient accumulation",
    )
    left.set(title="Time per step and worker", ylabel="milliseconds", ylim=(0, None))
    right.plot(workers, [row["copies"] for row in rows], "o-", color="#d62728", label="kept: versions of shards")
    right.plot(workers, workers, "--", color="grey", label="a copy per worker")
    right.set(title="Most memory that weights took", ylabel="copies of the model", yscale="log")
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xticks(workers, [str(n) for n in workers])
        axes.set_xlabel("virtual workers")
        axes.grid(alpha=0.35)
        axes.legend()
    figure.savefig(path, dpi=110, format="png")
    pyplot.close(figure)


def _write(path: Path, content: bytes) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_bytes(content)
    os.replace(aside, path)


def _versions() -> str:
    import megatron.core

    return (
        f"megatron-lossy {__version__}, megatron-core {megatron.core.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def main() -> None:
    """Run both parts and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=64, help="of the large model")
    parser.add_argument("--rounds", type=int, default=9, help="steps of each variant")
    parser.add_argument("--growth", type=int, nargs="*", default=[1, 4, 16, 64, 256, 1024], metavar="N")
    parser.add_argument("--out", default="benchmarks/results")
    arguments = parser.parse_args()
    with usage_errors("virtual_overhead"):
        if arguments.workers < 2:
            raise refuse("--workers", arguments.workers, "must be at least 2")
        if arguments.rounds < 4:
            raise refuse("--rounds", arguments.rounds, "must be at least 4, for quartiles")
        if min(arguments.growth, default=1) < 1:
            raise refuse("--growth", min(arguments.growth), "must be at least 1")
    device.prepare()
    from megatron_lossy.train import parallel

    config = TrainConfig(
        **SMALL, micro_batch_size=1, global_batch_size=1, train_iters=1, lr=1e-4, data_path=("random",), eval_iters=0
    )
    with parallel.world(config), parallel.model_parallel(config):
        large = overhead(arguments.workers, arguments.rounds)
        print(large)
        gc.collect()
        rows = growth(arguments.growth, rounds=max(3, arguments.rounds // 3))
    _report(arguments, large, rows)


def _report(arguments: Any, large: str, rows: list[dict[str, float]]) -> None:
    date = datetime.date.today().isoformat()
    hardware = torch.cuda.get_device_name() if device.device_type() == "cuda" else processor()
    name = f"virtual_overhead_{device.device_type()}_{date}"
    lines = [
        f"# Virtual workers, {date}",
        "",
        f"`python -m benchmarks.virtual_overhead {' '.join(sys.argv[1:])}`".replace(" `", "`"),
        f"{hardware}, {torch.get_num_threads()} threads. {_versions()}.",
        "",
        "## Overhead",
        "",
        large,
    ]
    if rows:
        lines += [
            "",
            "## Growth",
            "",
            f"{rows[-1]['parameters'] / 1e6:.2f} M parameters, {SMALL['seq_length']} tokens per worker and step, "
            f"unit shard, p = {P}.",
            "",
            "| workers | step, s | per worker, ms | ratio to plain accumulation | weights, copies of the model |",
            "| --- | --- | --- | --- | --- |",
            *(
                f"| {row['workers']} | {row['step, s']:.2f} | {row['step per worker, ms']:.1f} | {row['ratio']:.3f} "
                f"| {row['copies']:.2f} |"
                for row in rows
            ),
            "",
            f"![growth]({name}.png)",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / f"{name}.md", text.encode())
    if rows:
        table = io.StringIO()
        writer = csv.DictWriter(table, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
        _write(folder / f"{name}.csv", table.getvalue().encode())
        plot(rows, folder / f"{name}.png")
    print(f"wrote {folder / name}.md")


if __name__ == "__main__":
    main()
