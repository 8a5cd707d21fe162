"""How fast codes of 8 and 4 bits are made and read, in C and by torch, beside copying the values, on one core."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from unittest import mock

import numpy as np
import torch

from benchmarks.common import RESULTS, made_with, today, write_results
from megatron_lossy.base.coding import compiled
from megatron_lossy.base.coding.blocks import BlockCode
from megatron_lossy.base.exchange import cut

_REPEATS, _PACKET = 30, 1408


def nanoseconds(work: Callable[[], object], elements: int) -> float:
    """Of an element: the median of many, in time of this process, which others do not add to."""
    times = []
    for _ in range(_REPEATS):
        started = time.process_time()
        work()
        times.append(time.process_time() - started)
    return 1e9 * float(np.median(times)) / elements


def row(code: BlockCode, elements: int) -> list[float]:
    """Nanoseconds of an element: rounded at random, to nearest, and read again."""
    [units], _ = cut([elements], [4], "packet", _PACKET, [code.elements(_PACKET)])
    values, keys = torch.randn(1, elements), torch.tensor([[3, 4]], dtype=torch.int32)
    payload, again = code.encode(values, units), torch.empty(1, elements)
    works = (
        lambda: code.encode(values, units, keys),
        lambda: code.encode(values, units),
        lambda: code.decode(payload, units, again),
    )
    return [nanoseconds(work, elements) for work in works]


def main(argv: list[str] | None = None) -> None:
    """The program."""
    parser = argparse.ArgumentParser("python -m benchmarks.block_code_speed", description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, default=2**20, metavar="N", help="of a shard (default 2^20)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rows, values, copy = [], torch.randn(args.elements), torch.empty(args.elements)
    copied = nanoseconds(lambda: copy.copy_(values), args.elements)
    for code in (BlockCode(8, 128), BlockCode(4, 128), BlockCode(4, 32)):
        for name, serves in (("C", compiled.serves), ("torch", lambda *_: False)):
            with mock.patch.object(compiled, "serves", serves):
                measured = [*row(code, args.elements), copied]
            rows.append(
                f"| {code}, blocks of {code.block} | {name} | " + " | ".join(f"{one:.2f}" for one in measured) + " |"
            )
    lines = [
        "# Speed of codes in blocks",
        "",
        *(f"- {line}" for line in made_with("benchmarks.block_code_speed", argv or [])),
        "",
        f"Nanoseconds of an element, one core, {args.elements:,} float32; medians of {_REPEATS} of the process's own time.",
        "",
        "| code | by | round at random | round to nearest | read | copy of the values |",
        "| --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    write_results(args.out, f"block_code_speed_{today()}", md=text)


if __name__ == "__main__":
    main()
