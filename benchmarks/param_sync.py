"""Cost of keeping full replicas equal: time of steps over that of the same steps of unhooked megatron-core.

    python -m benchmarks.param_sync [--ranks 2] [--rounds 12] [--interval 20] [--out benchmarks/results]

Data parallelism without the distributed optimizer, and without errors (docs/corruption.md). Every variant trains the GPT of
benchmarks.step_overhead in one launch. Variants take turns, as many steps each as there are between two synchronisations, so
that overlapped work falls on the variant's own steps; the order rotates. The ratio of each is the median over rounds of the time of
its steps over the baseline's in the same round. Where nothing is sent since replicas are equal, the table says so; to time an
average they are averaged all the same.

Below it are Table 1 of *Identifying and Mitigating Errors in Gradient Aggregation of Distributed Data Parallel Training*, and
what a model says of the same overhead: no measurement.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.common import heading
from benchmarks.step_overhead import (
    AGAIN,
    BASELINE,
    Settings,
    Trainer,
    compare,
    program,
    ratios,
    spread,
    turns,
)
from megatron_lossy.config import LossyConfig

#: Seconds of an iteration of ResNet-50, by workers: DSGD, PAFT-Sync, PAFT.
TABLE_1 = {4: (0.201, 0.243, 0.237), 8: (0.212, 0.254, 0.244), 16: (0.228, 0.276, 0.253), 32: (0.333, 0.411, 0.373)}


@dataclass(frozen=True)
class ReplicaSettings(Settings):
    """The model, and H: updates between synchronisations."""

    distributed: bool = False
    rounds: int = 12
    interval: int = 20


def variants(interval: int) -> dict[str, dict[str, Any] | None]:
    """Return flags by variant; None is unhooked megatron-core."""
    averages = {"param_sync_interval": interval, "param_sync_state": "params:always"}
    return {
        BASELINE: None,
        AGAIN: None,
        f"H = {interval}, nothing to send": {"param_sync_interval": interval},
        "check and repair, nothing to repair": {"replica_check": "repair"},
        f"H = {interval}": averages,
        f"H = {interval}, overlapped": averages | {"param_sync_overlap": True},
    }


class Replica(Trainer):
    """A variant."""

    _settings: ReplicaSettings

    def steps(self) -> None:
        """Make as many steps as there are between two synchronisations."""
        for _ in range(self._settings.interval):
            self.step()


def run(settings: ReplicaSettings) -> dict[str, Any]:
    """Run everything on every rank; the result of rank 0 counts."""
    trainers = {
        name: Replica(settings, None if flags is None else LossyConfig(**flags))
        for name, flags in variants(settings.interval).items()
    }
    times = compare(trainers, "steps", settings.rounds, warm_up=1)
    syncs = {name: own.lossy.metrics().get("param syncs", 0.0) for name, own in trainers.items() if own.lossy}
    return {
        "command": " ".join(["python -m benchmarks.param_sync", *sys.argv[1:]]),
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in trainers[BASELINE].model.parameters()),
        "times": {"steps": times},
        "synchronisations": syncs,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    settings = result["settings"]
    interval = settings["interval"]
    what = (
        f"{result['ranks']} ranks, {settings['sequence'] * settings['micro_batch']} tokens per rank and step, "
        f"{turns(result)} of {interval} steps"
    )
    lines = [
        *heading("Overhead of keeping replicas equal", result, what),
        "| variant | step, s | ratio (quartiles) | averages in all |",
        "| --- | --- | --- | --- |",
    ]
    for name, part in ratios(result["times"]["steps"]).items():
        syncs = f"{result['synchronisations'][name]:.0f}" if name in result["synchronisations"] else ""
        lines.append(f"| {name} | {part['seconds'] / interval:.3f} | {spread(part)} | {syncs} |")
    caption = (
        f"The paper's Table 1, overhead over its DSGD, and by the model with H = {interval}: a synchronisation of float32 "
        "parameters takes as long as the exchange of float32 gradients, which is at most the whole step. Printed as a "
        "model; nothing of that column is measured."
    )
    lines += [
        "",
        caption,
        "",
        f"| workers | PAFT-Sync, paper | PAFT, paper | H = {interval} without overlap, model, at most |",
        "| --- | --- | --- | --- |",
    ]
    for workers, (plain, sync, dynamic) in TABLE_1.items():
        cells = [f"{100 * (seconds / plain - 1):.1f} %" for seconds in (sync, dynamic)]
        lines.append(f"| {workers} | {cells[0]} | {cells[1]} | {100 / interval:.1f} % |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    program(sys.modules[__name__], ReplicaSettings, "layers", "hidden", "bf16", "interval", ranks=2)
