"""Time to draw the losses of a step: 64 workers, one phase, for one rank and for a whole virtual cluster.

A rank's packets are those of 7 billion bf16 parameters, the virtual cluster's those of 100 million, 4 KiB each.

    python -m benchmarks.draw_speed [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable

from benchmarks.common import RESULTS, today, version_list, write_results
from megatron_lossy.base.device.environment import processor
from megatron_lossy.base.exchange import BucketUnits, Exchange, Stream
from megatron_lossy.config import LossyConfig
from megatron_lossy.transport import Network
from megatron_lossy.transport.drawn import CollectiveWire
from megatron_lossy.transport.memory import Memory

WORKERS, PACKET, REPEATS = 64, 4096, 15
RANK_BYTES, CLUSTER_BYTES = 2 * 7_000_000_000, 2 * 100_000_000
MODELS = {
    "bernoulli": {},
    "gilbert-elliott, mean burst 4": {"loss_model": ("gilbert-elliott:4",)},
}


def units_of(unit: str, size: int) -> int:
    """Units on a link, of ``size`` bytes of parameters."""
    return -(-size // WORKERS // PACKET) if unit == "packet" else 1


def of_rank(config: LossyConfig) -> tuple[int, list[float]]:
    """Units drawn by a rank, and the milliseconds of each repetition."""
    units = units_of(config.loss_unit, RANK_BYTES)
    parts = {"param": [BucketUnits(0, units, units, 1)]}
    rank = CollectiveWire({"param": Network(config, "param", WORKERS)}, Stream(), range(WORKERS), 0, parts)
    return units * (WORKERS - 1), [
        milliseconds(lambda step=step: rank.foresee(exchange(step))) for step in range(REPEATS)
    ]


def of_cluster(config: LossyConfig) -> tuple[int, list[float]]:
    """Units drawn between all workers of a virtual cluster, and the milliseconds of each repetition."""
    units = units_of(config.loss_unit, CLUSTER_BYTES)
    parts = {"param": [BucketUnits(0, units, units, 1)]}
    memory = Memory({"param": Network(config, "param", WORKERS)}, Stream(), WORKERS, parts)
    times = [milliseconds(lambda step=step: memory.foresee(exchange(step))) for step in range(REPEATS)]
    return units * WORKERS * (WORKERS - 1), times


def exchange(step: int) -> Exchange:
    """The broadcast of ``step``."""
    return Exchange("param", Stream(), step)


def milliseconds(work: Callable[[], object]) -> float:
    """How long ``work`` takes."""
    start = time.perf_counter()
    work()
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS)
    out = parser.parse_args().out
    lines = [
        f"# Drawing losses, {today()}",
        "",
        (
            f"`python -m benchmarks.draw_speed`: {WORKERS} workers, {PACKET}-byte packets of {RANK_BYTES / 1e9:.0f} GB "
            f"of parameters (one rank) and {CLUSTER_BYTES / 1e9:.1f} GB (all links of a virtual cluster), a step of "
            f"one phase, median of {REPEATS}. One of {processor()}; {version_list()}."
        ),
        "",
        "| who draws | loss model | unit | draws | milliseconds of one core |",
        "| --- | --- | --- | --- | --- |",
    ]
    for who, draw in (("one rank", of_rank), ("virtual cluster", of_cluster)):
        for (name, flags), unit in itertools.product(MODELS.items(), ("packet", "shard")):
            draws, times = draw(LossyConfig(p_param=0.1, loss_unit=unit, **flags))
            lines.append(f"| {who} | {name} | {unit} | {draws:,} | {statistics.median(times):.1f} |")
    text = "\n".join(lines) + "\n"
    print(text)
    write_results(out, f"draw_speed_{today()}", md=text)


if __name__ == "__main__":
    main()
