"""How fast XOR parity is made and used, beside copying the same bytes, on one core."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np

from benchmarks.common import RESULTS, made_with, today, write_results
from megatron_lossy.base.coding import Layout, decode, encode

CODES = ((100, 10), (100, 34), (100, 50))
PACKETS = (4096, 1408)
_REPEATS = 30


def rate(work: Callable[[], object], size: int) -> float:
    """GB/s over ``size`` bytes: the median of many."""
    times = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return size / float(np.median(times)) / 1e9


def rates(message: np.ndarray, layout: Layout, lost: np.ndarray) -> list[float]:
    """GB/s of copying ``message``, of its parity, and of decoding it where nothing is lost and where ``lost`` is."""
    copy, parities = message.copy(), encode(message, layout)
    nothing, there = np.zeros_like(lost), np.zeros(layout.parities, dtype=bool)
    works = (
        lambda: np.copyto(copy, message),
        lambda: encode(message, layout),
        lambda: decode(message, nothing, parities, there, layout),
        lambda: decode(message, lost, parities, there, layout),
    )
    return [rate(work, message.nbytes) for work in works]


def main(argv: list[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser("python -m benchmarks.code_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--packets", type=int, default=4096, metavar="N", help="of a message (default 4096)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    args = parser.parse_args(argv)
    random, rows = np.random.default_rng(0), []
    for size in PACKETS:
        message = random.integers(0, 256, (args.packets, size), dtype=np.uint8)
        for block, parity in CODES:
            measured = rates(message, Layout(args.packets, block, parity), random.random(args.packets) < 0.02)
            rows.append(f"| {size} | ({block}, {parity}) | " + " | ".join(f"{one:.1f}" for one in measured) + " |")
    lines = [
        "# Speed of XOR parity",
        "",
        *(f"- {line}" for line in made_with("benchmarks.code_speed", argv or [])),
        "",
        f"GB/s of data, one core, messages of {args.packets} packets; medians of {_REPEATS}.",
        "",
        "| packet, bytes | code | copy | encode | decode, nothing lost | decode, 2 % lost |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    write_results(args.out, f"code_speed_{today()}", md=text)


if __name__ == "__main__":
    main()
