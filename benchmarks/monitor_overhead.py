"""Cost of the monitors: time of a lossy step with them over time of the same step without.

    python -m benchmarks.monitor_overhead [--ranks 4] [--rounds 40] [--out benchmarks/results]

The model is that of benchmarks.step_overhead. Per unit of loss three variants take turns, one step each: without
monitors; with them and a record after every step; and with drift measured in every step as well. From the median
ratios follows the cost of drift every 50 steps. A ratio near 1 drowns in the noise of a step, so that the calls of
the monitors are timed by themselves too, and divided by the median step.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from typing import Any

import torch.distributed as dist

from benchmarks.common import heading
from benchmarks.step_overhead import (
    Settings,
    Trainer,
    compare,
    lossy_config,
    program,
    ratios,
    spread,
    turns,
)
from megatron_lossy.run.monitor import Drift, ExchangeMonitor

UNITS = {"shard": {"loss_unit": "shard"}, "packet 4 KiB": {"loss_unit": "packet", "packet_bytes": 4096}}
INTERVAL = 50
#: Steps between measurements of drift, by variant; 0: never, None: without any monitor.
VARIANTS = {"off": None, "on": 0, "drift in every step": 1}
COUNTING, DRIFT, RECORD = "counting, every step", f"drift, every {INTERVAL} steps", "a record, every log interval"


class Monitored(Trainer):
    """A variant with monitors and a record after every step; without monitors if ``drift`` is ``None``."""

    def __init__(self, settings: Settings, flags: dict, drift: int | None) -> None:
        super().__init__(settings, lossy_config(settings, flags | {"drift_interval": drift or 0}))
        if drift is None:
            self.lossy.observers.clear()

    def step(self) -> None:
        super().step()
        self.lossy.metrics()

    def seconds_of_calls(self, steps: int) -> dict[str, float]:
        """Return the median seconds per step in each of the runtime's calls of monitors, with drift in every step."""
        counting, drift = (
            next(one for one in self.lossy.observers if isinstance(one, kind)) for kind in (ExchangeMonitor, Drift)
        )
        spent: dict[str, float] = {}

        def timed(owner: Any, name: str, what: str) -> None:
            original = getattr(owner, name)

            @functools.wraps(original)
            def call(*args: Any) -> Any:
                dist.barrier()  # waiting for a slower rank is no cost of the monitors
                started = time.perf_counter()
                result = original(*args)
                spent[what] = spent.get(what, 0.0) + time.perf_counter() - started
                return result

            setattr(owner, name, call)

        timed(counting, "observe", COUNTING)
        timed(drift, "before_update", DRIFT)
        timed(drift, "finish_iteration", DRIFT)
        timed(self.lossy, "metrics", RECORD)
        history: dict[str, list[float]] = {}
        for _ in range(steps):
            spent.clear()
            self.timed(self.step)
            for what, seconds in spent.items():
                history.setdefault(what, []).append(seconds)
        return {what: statistics.median(seconds) for what, seconds in history.items()}


def run(settings: Settings) -> dict[str, Any]:
    """Run everything on every rank; the result of rank 0 counts."""
    times, calls = {}, {}
    for unit, flags in UNITS.items():
        trainers = {name: Monitored(settings, flags, drift) for name, drift in VARIANTS.items()}
        times[unit] = compare(trainers, "step", settings.rounds)
        calls[unit] = trainers["drift in every step"].seconds_of_calls(settings.rounds)
    model = trainers["off"].model
    return {
        "command": " ".join(["python -m benchmarks.monitor_overhead", *sys.argv[1:]]),
        "settings": dataclasses.asdict(settings),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "times": times,
        "seconds of calls": calls,
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    what = f"{result['ranks']} ranks, p = {result['settings']['p']}, {turns(result)}"
    lines = [
        *heading("Overhead of monitors", result, what),
        (
            "| unit | step without, s | ratio with (quartiles) | ratio with drift in every step | "
            f"ratio with drift every {INTERVAL} steps | the calls alone, share of a step |"
        ),
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for unit, calls in result["seconds of calls"].items():
        steps = ratios(result["times"][unit])
        off, on, always = (steps[name] for name in VARIANTS)
        monitoring = calls[COUNTING] + calls[DRIFT] / INTERVAL + calls[RECORD]
        seldom = on["ratio"] + (always["ratio"] - on["ratio"]) / INTERVAL
        share = 100 * monitoring / off["seconds"]
        lines.append(
            f"| {unit} | {off['seconds']:.3f} | {spread(on)} | {always['ratio']:.3f} | {seldom:.3f} | {share:.3f} % |"
        )
    lines += ["", "With a record after every step. Milliseconds of the calls alone:", ""]
    names = [COUNTING, DRIFT, RECORD]
    lines += ["| unit | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    for unit, calls in result["seconds of calls"].items():
        cells = [f"{1e3 * calls[name]:.2f}" for name in names]
        lines.append(f"| {unit} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    program(sys.modules[__name__], Settings, "layers", "hidden", rounds=40)
