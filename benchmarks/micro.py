"""Measure one thing at a time, on one core.

    python -m benchmarks.micro draws       # time to draw the losses of a step
    python -m benchmarks.micro log         # bytes that the delivery log takes
    python -m benchmarks.micro codes       # time to make and read codes of 8 and 4 bits

Each prints a table, and writes it to ``--out``.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet  # noqa: F401  # here, so that no measurement waits for it
import torch

from benchmarks.common import RESULTS, made_with, today, write_results
from megatron_lossy.base.coding import compiled
from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.exchange import BucketUnits, Delivery, Exchange, Stream, cut
from megatron_lossy.config import PHASES, LossyConfig
from megatron_lossy.delivery_log.writer import DeliveryLog
from megatron_lossy.lab.virtual.in_memory import Memory
from megatron_lossy.transport import Network
from megatron_lossy.transport.base import CollectiveWire, draw

WORKERS, PACKET, REPEATS = 64, 4096, 15
RANK_BYTES, CLUSTER_BYTES = 2 * 7_000_000_000, 2 * 100_000_000
BUCKETS, SHARD = 109, 1_000_000  # of 7 billion parameters, as Megatron cuts them for 64 ranks
ITEMSIZE = {"grad": 4, "param": 2}
ELEMENTS = 2**20


def milliseconds(works: list[Callable[[], object]]) -> float:
    """Return the median time of ``works``, in time of this process, which others do not add to."""
    times = []
    for work in works:
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return 1e3 * statistics.median(times)


def draws() -> list[list[Any]]:
    """Time draws for a rank, and for all links of a virtual cluster: packets of 4 KiB or whole shards."""
    models: dict[str, dict[str, Any]] = {"bernoulli": {}, "gilbert-elliott:4": {"loss_model": ("gilbert-elliott:4",)}}
    rows: list[list[Any]] = [["drawn by", "loss model", "unit", "draws", "ms"]]
    for cluster, (name, flags), unit in itertools.product((False, True), models.items(), ("packet", "shard")):
        size = CLUSTER_BYTES if cluster else RANK_BYTES
        units = -(-size // WORKERS // PACKET) if unit == "packet" else 1
        networks = {"param": Network(LossyConfig(p_param=0.1, loss_unit=unit, **flags), "param", WORKERS)}
        parts, stream = {"param": [BucketUnits(0, units, units, 1)]}, Stream()
        wire: Any = Memory(networks, stream, range(WORKERS), parts) if cluster else None
        wire = wire or CollectiveWire(networks, stream, range(WORKERS), 0, parts)
        took = milliseconds(
            [lambda step=step, wire=wire: wire.foresee(Exchange("param", Stream(), step)) for step in range(REPEATS)]
        )
        links = WORKERS * (WORKERS - 1) if cluster else WORKERS - 1
        rows.append(["virtual cluster" if cluster else "one rank", name, unit, f"{units * links:,}", f"{took:.1f}"])
    return rows


def log() -> list[list[Any]]:
    """Measure the log of one rank of 64, bf16 parameters and fp32 gradients: bytes of an iteration, and time to write them."""
    cases: dict[str, tuple[dict[str, Any], int]] = {
        "shard": ({}, 1000),
        "bucket": ({"loss_unit": "bucket"}, 100),
        "packet, digests": ({"loss_unit": "packet", "packet_bytes": PACKET}, 100),
    }
    rows: list[list[Any]] = [["unit", "units per link", "loss rate", "iterations", "bytes per iteration", "ms"]]
    for (name, (flags, iterations)), rate in itertools.product(cases.items(), (0.1, 0.4)):
        with tempfile.TemporaryDirectory() as folder:
            config = LossyConfig(p_grad=rate, p_param=rate, delivery_log=folder, **flags)
            ends = {
                phase: (*cut([SHARD] * BUCKETS, [ITEMSIZE[phase]] * BUCKETS, config.loss_unit, PACKET), phase)
                for phase in PHASES
            }
            writer, took = DeliveryLog(config), 0.0
            for step in range(iterations):
                told = []
                for units, total, phase in ends.values():
                    exchange, network = Exchange(phase, Stream(), step), Network(config, phase, WORKERS)
                    lost = draw(network, exchange, range(WORKERS), [0], total)
                    told.append(Delivery(exchange, range(WORKERS), [0], lost, units))
                start = time.process_time()
                for delivery in told:
                    writer.observe(delivery)
                writer.finish_iteration(step, True, list)
                took += time.process_time() - start
            start = time.process_time()
            writer.close()
            took += time.process_time() - start
            size = sum(path.stat().st_size for path in Path(folder).iterdir()) / iterations
        units_per_link = sum(total for _, total, _ in ends.values())
        row = [name, f"{units_per_link:,}", f"{rate:.0%}", iterations, f"{size:,.0f}", f"{1e3 * took / iterations:.2f}"]
        rows.append(row)
    return rows


def codes() -> list[list[Any]]:
    """Time codes in C and by torch, and a copy of the values."""
    rows: list[list[Any]] = [["code", "by", "round at random, ns", "round to nearest, ns", "read, ns", "copy, ns"]]
    values, keys, again = torch.randn(1, ELEMENTS), torch.tensor([[3, 4]], dtype=torch.int32), torch.empty(1, ELEMENTS)
    for code in (BlockCode(8, 128), BlockCode(4, 128), BlockCode(4, 32)):
        [units], _ = cut([ELEMENTS], [4], "packet", 1408, [code.elements(1408)])
        payload = code.encode(values, units)
        works: list[Callable[[], object]] = [
            lambda code=code, units=units: code.encode(values, units, keys),
            lambda code=code, units=units: code.encode(values, units),
            lambda code=code, units=units, payload=payload: code.decode(payload, units, again),
            lambda: again.copy_(values),
        ]
        for name, serves in (("C", compiled.serves), ("torch", lambda *_: False)):
            with mock.patch.object(compiled, "serves", serves):
                took = [f"{1e6 * milliseconds([work] * REPEATS) / ELEMENTS:.2f}" for work in works]
            rows.append([f"{code}, blocks of {code.block}", name, *took])
    return rows


TABLES = {"draws": draws, "log": log, "codes": codes}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=TABLES)
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    head, *rows = TABLES[args.what]()
    lines = [
        f"# Micro-benchmark: {args.what}",
        "",
        *(f"- {line}" for line in made_with("benchmarks.micro", sys.argv[1:])),
    ]
    lines += ["", *("| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *rows))]
    text = "\n".join(lines) + "\n"
    print(text)
    write_results(args.out, f"micro_{args.what}_{today()}", md=text)


if __name__ == "__main__":
    main()
