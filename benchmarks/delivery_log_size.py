"""Bytes that the delivery log takes per iteration and rank: one rank of 64, a model of 7 billion parameters.

python -m benchmarks.delivery_log_size [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet  # here, so that no measurement waits for it

from benchmarks.common import RESULTS, today, version_list, write_results
from megatron_lossy.base.device.environment import processor
from megatron_lossy.base.exchange import Delivery, Exchange, Stream, cut
from megatron_lossy.config import PHASES, LossyConfig
from megatron_lossy.delivery_log.writer import DeliveryLog
from megatron_lossy.transport import Network
from megatron_lossy.transport.drawn import draw

WORKERS, PARAMETERS, BUCKET = 64, 7_000_000_000, 64_000_000  # a bucket as Megatron cuts it for 64 ranks
ITEMSIZE = {"grad": 4, "param": 2}
RATES = (0.1, 0.4)
#: Name, flags, iterations.
CASES = (
    ("shard", {}, 1000),
    ("bucket", {"loss_unit": "bucket"}, 100),
    ("packet of 4096 bytes, digests", {"loss_unit": "packet"}, 100),
    ("packet of 4096 bytes, bitmaps", {"loss_unit": "packet", "delivery_log_bitmaps": True}, 20),
)


def measure(flags: dict, rate: float, iterations: int) -> tuple[int, float, float]:
    """Units per link and iteration in both phases, bytes per iteration and rank, and milliseconds to write them."""
    shards = [BUCKET // WORKERS] * (PARAMETERS // BUCKET)
    stream, seconds = Stream(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        config = LossyConfig(p_grad=rate, p_param=rate, delivery_log=folder, **flags)
        log, ends = DeliveryLog(config), {}
        for phase in PHASES:
            units, total = cut(shards, [ITEMSIZE[phase]] * len(shards), config.loss_unit, config.packet_bytes)
            ends[phase] = units, total, Network(config, phase, WORKERS)
        for step in range(iterations):
            told = []
            for phase, (units, total, network) in ends.items():
                exchange, workers = Exchange(phase, stream, step), range(WORKERS)
                told.append(Delivery(exchange, workers, [0], draw(network, exchange, workers, [0], total), units))
            start = time.process_time()
            for delivery in told:
                log.observe(delivery)
            log.finish_iteration(step, True, list)
            seconds += time.process_time() - start
        start = time.process_time()
        log.close()
        seconds += time.process_time() - start
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
    return sum(total for _, total, _ in ends.values()), size / iterations, 1e3 * seconds / iterations


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=RESULTS)
    out = parser.parse_args().out
    lines = [
        f"# Size of the delivery log, {today()}",
        "",
        (
            f"`python -m benchmarks.delivery_log_size`: one rank of {WORKERS}, {PARAMETERS / 1e9:.0f} billion parameters in "
            f"{PARAMETERS // BUCKET} buckets, bf16 parameters and fp32 gradients, independent losses at the same rate in "
            f"both phases, files of {LossyConfig().delivery_log_chunk} iterations or less. One of {processor()}; "
            f"pyarrow {pyarrow.__version__}, {version_list()}."
        ),
        "",
        (
            "| unit | units per link, both phases | loss rate | iterations | bytes per iteration and rank | "
            "milliseconds of one core per iteration |"
        ),
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, flags, iterations in CASES:
        for rate in RATES:
            units, size, milliseconds = measure(flags, rate, iterations)
            lines.append(
                f"| {name} | {units:,} | {100 * rate:.0f} % | {iterations} | {size:,.0f} | {milliseconds:.2f} |"
            )
            print(lines[-1], flush=True)
    write_results(out, f"delivery_log_size_{today()}", md="\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
