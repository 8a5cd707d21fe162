"""Time to draw the losses of one rank and phase: 64 workers, 7 billion bf16 parameters, 4 KiB packets.

    python -m benchmarks.draw_speed [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import time
from pathlib import Path

import numpy as np

from benchmarks.hardware import processor
from megatron_lossy.channel import Deliveries, Network, Stream
from megatron_lossy.config import LossyConfig

WORKERS, BYTES, PACKET, REPEATS = 64, 2 * 7_000_000_000, 4096, 15
CONFIGS = {
    "bernoulli": LossyConfig(p_param=0.1, loss_unit="packet"),
    "gilbert-elliott, mean burst 4": LossyConfig(
        p_param=0.1, loss_unit="packet", loss_model=("gilbert-elliott",), ge_mean_burst=(4.0,)
    ),
    "bernoulli, one unit per shard": LossyConfig(p_param=0.1, loss_unit="shard"),
}


def milliseconds(config: LossyConfig) -> tuple[int, list[float]]:
    """Units drawn, and the time of each repetition."""
    units = -(-BYTES // WORKERS // PACKET) if config.loss_unit == "packet" else 1
    end = Deliveries(Network(config, "param", WORKERS), Stream(), range(WORKERS), 0, units)
    times = []
    for step in range(REPEATS):
        start = time.perf_counter()
        end.incoming(step)
        times.append(1e3 * (time.perf_counter() - start))
    return units * (WORKERS - 1), times


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results")
    folder = Path(parser.parse_args().out)
    today = datetime.date.today().isoformat()
    lines = [
        f"# Drawing losses, {today}",
        "",
        f"`python -m benchmarks.draw_speed`: {WORKERS} workers, {BYTES / 1e9:.0f} GB of parameters, {PACKET}-byte "
        f"packets, one rank, one phase, median of {REPEATS}. One of {processor()}; numpy {np.__version__}, "
        f"Python {platform.python_version()}.",
        "",
        "| loss model | draws | milliseconds of one core |",
        "| --- | --- | --- |",
    ]
    for name, config in CONFIGS.items():
        draws, times = milliseconds(config)
        lines.append(f"| {name} | {draws:,} | {statistics.median(times):.1f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f"draw_speed_{today}.tmp"
    aside.write_text(text)
    os.replace(aside, aside.with_suffix(".md"))


if __name__ == "__main__":
    main()
