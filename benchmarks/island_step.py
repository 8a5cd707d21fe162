"""Cost of averaging between islands: time of steps with it over that of steps of unhooked megatron-core.

    python -m benchmarks.island_step [--islands 2] [--steps 4] [--rounds 14] [--out benchmarks/results]

Islands of one rank each (docs/islands.md), which train the GPT of benchmarks.step_overhead. Variants take turns, several steps
each, so that data travel only during a variant's own steps; the order rotates. The ratio of each is the median over
rounds of the time of its steps over the baseline's in the same round. Bytes are what the loopback interface carried meanwhile,
by the kernel's counter, with the headers of IP and TCP, next to the bytes sent by the islands' metric.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import psutil
import torch

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
from megatron_lossy.mechanisms.islands.carrying import Collectives
from megatron_lossy.mechanisms.islands.world import IslandWorld

_FEW = {"sync_method": "parameters", "sync_fraction": 0.05}
_MUCH = {"sync_method": "parameters", "sync_fraction": 0.25, "sync_block": 128, "sync_delay": 10}
#: Flags by variant; None is unhooked megatron-core.
VARIANTS: dict[str, dict[str, Any] | None] = {
    BASELINE: None,
    AGAIN: None,
    "5 %, at once": _FEW,
    "5 %, 10 late, mixing": _FEW | {"sync_delay": 10},
    "5 %, 10 late, ema": _FEW | {"sync_delay": 10, "delay_correction": "ema:0.5,0.5,1000"},
    "5 %, 10 late, mixing, bf16": _FEW | {"sync_delay": 10, "sync_dtype": "bf16"},
    "5 %, 10 late, mixing, blocks of 128": _FEW | {"sync_delay": 10, "sync_block": 128},
    "1 %, 10 late, mixing": _FEW | {"sync_fraction": 0.01, "sync_delay": 10},
    # Where three exchanges of an element are under way at once.
    "25 %, 10 late, mixing, blocks of 128": _MUCH,
    "25 %, 10 late, smith, blocks of 128": _MUCH | {"delay_correction": "smith"},
}
#: Steps after which every variant uses means.
LATEST = 12


@dataclass(frozen=True)
class IslandSettings(Settings):
    """The model, the islands, and how many steps a variant makes at a time."""

    rounds: int = 14
    islands: int = 2
    steps: int = 4


class Island(Trainer):
    """A variant, on this rank's island."""

    _settings: IslandSettings

    def __init__(self, settings: IslandSettings, flags: dict[str, Any] | None) -> None:
        world = IslandWorld(settings.islands)
        world.open(_made_already, timedelta(minutes=10))
        self._meeting, self.carried = Collectives(world, "benchmark"), 0
        config = None if flags is None else LossyConfig(islands=settings.islands, **flags)
        super().__init__(settings, config, None if config is None else world)

    def barrier(self) -> None:
        """Let the ranks of all islands come here."""
        super().barrier()
        self._meeting.gather(torch.zeros(1))

    def timed(self, work: Callable[[], None]) -> float:
        """Return the seconds that ``work`` takes, and count bytes meanwhile."""
        before = _loopback_bytes()
        seconds = super().timed(work)
        self.carried = _loopback_bytes() - before
        return seconds

    def steps(self) -> None:
        """Make as many steps as it makes at a time."""
        for _ in range(self._settings.steps):
            self.step()


def _made_already(**_: Any) -> None:
    """Use the group of this island, which is there; a variant only needs a store of its own."""


def _loopback_bytes() -> int:
    counters = psutil.net_io_counters(pernic=True)
    return counters["lo"].bytes_sent if "lo" in counters else 0


def run(settings: IslandSettings) -> dict[str, Any]:
    """Run everything on every rank; the result of the first island counts."""
    trainers = {name: Island(settings, flags) for name, flags in VARIANTS.items()}
    times = compare(trainers, "steps", settings.rounds, warm_up=-(-LATEST // settings.steps))
    metrics = {name: trainer.lossy.metrics() for name, trainer in trainers.items() if trainer.lossy}
    return {
        "command": " ".join(["python -m benchmarks.island_step", *sys.argv[1:]]),
        "settings": asdict(settings),
        "parameters": sum(parameter.numel() for parameter in trainers[BASELINE].model.parameters()),
        "times": {"steps": times},
        "megabytes": {
            name: {
                "sent": settings.islands * metrics[name]["sync bytes"] / 1e6 if name in metrics else None,
                "carried": trainer.carried / settings.steps / 1e6,
            }
            for name, trainer in trainers.items()
        },
        "wait": {name: found["sync wait"] for name, found in metrics.items()},
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    settings, count = result["settings"], result["settings"]["steps"]
    what = (
        f"{settings['islands']} islands of one rank, {settings['sequence'] * settings['micro_batch']} tokens per rank and "
        f"step, {turns(result)} of {count} steps"
    )
    lines = [
        *heading("Islands in a step", result, what),
        "| variant | step, s | ratio (quartiles) | waited in a step, s | MB in a step, all islands | on loopback |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, part in ratios(result["times"]["steps"]).items():
        wait, megabytes = result["wait"].get(name), result["megabytes"][name]
        cells = [name, f"{part['seconds'] / count:.3f}", spread(part)]
        cells.append("" if wait is None else f"{wait:.4f}")
        cells.append("" if megabytes["sent"] is None else f"{megabytes['sent']:.2f}")
        cells.append(f"{megabytes['carried']:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    program(sys.modules[__name__], IslandSettings, "islands", "layers", "hidden", "bf16", "steps")
