"""Cost of protecting the most important packets: exchanges over UDP with and without, taking turns over a lossy link.

``--grad-recovery error-feedback`` with a share of high priority against no protection: times, datagrams besides the
data, and packets of high priority that did not arrive.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.exchange.contestants import Team, our_config, span
from benchmarks.exchange.rows import Row
from benchmarks.lab import Lab, MissingRequirement, end_in_order
from megatron_lossy.base.errors import refuse, usage_errors

NAMES = ("none", "protected")
_WARM_UP = 20
_LIMIT = 60.0


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks.udp_priority", description=__doc__.splitlines()[0])
    parser.add_argument("--exchanges", type=int, default=600, metavar="N", help="of each kind (default 600)")
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round-trip time (default 20)")
    parser.add_argument("--loss", type=float, default=0.05, metavar="P", help="share of packets lost (default 0.05)")
    parser.add_argument("--burst", type=float, metavar="N", help="mean packets lost in a row (default: independent)")
    parser.add_argument("--megabytes", type=float, default=4.0, metavar="MB", help="that a rank sends in an exchange")
    parser.add_argument("--fraction", type=float, default=0.01, metavar="K", help="of high priority (default 0.01)")
    parser.add_argument(
        "--flags", default="", help="more loss flags of the protected ones, as one word: '--udp-fec 100 50'"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def measure(args: argparse.Namespace) -> tuple[dict[str, list[float]], list, Sequence[str]]:
    """Return milliseconds of reduce-scatters by kind, and what the ranks of the protected ones sent."""
    row = Row("priority", args.rtt, args.loss, args.megabytes, args.burst)
    flags = f"--grad-recovery error-feedback --grad-priority packet-mean:{args.fraction} {args.flags}"
    times: dict[str, list[float]] = {name: [] for name in NAMES}
    with Lab(row.link(loss=False), seed=args.seed) as lab:
        configs = {"none": our_config(""), "protected": our_config(flags)}
        teams = {name: Team(lab, "ours", 2, [row.shard], config) for name, config in configs.items()}
        try:
            lab.set(row.link())
            for number in range(args.exchanges + _WARM_UP):
                for name in NAMES if number % 2 else NAMES[::-1]:
                    started, ended = span(teams[name].exchange("reduce-scatter", row.shard, _LIMIT))
                    if number >= _WARM_UP:
                        times[name].append(1000 * (ended - started))
                if sys.stdout.isatty() and number % 10 == 0:
                    print(f"\r{number} of {args.exchanges + _WARM_UP}\x1b[K", end="", flush=True)
            sent = teams["protected"].sent()
        finally:
            for team in teams.values():
                team.close()
        dropped = lab.dropped()
    return times, sent, [f"this machine dropped {dropped} packets itself"] if dropped else []


def markdown(args: argparse.Namespace, times: dict[str, list[float]], sent: list, header: Sequence[str]) -> str:
    """Return the result, as text."""
    lines = ["# Protecting what is important over UDP", "", *(f"- {line}" for line in header), ""]
    what = f"{args.megabytes:g} MB each way, {args.rtt:g} ms, {100 * args.loss:g} % lost, {100 * args.fraction:g} % of high priority"
    lines += [
        f"Two ranks, {what}. Milliseconds of a reduce-scatter, taking turns.",
        "",
        "| protection | median | P95 | P99 | exchanges |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in NAMES:
        cells = [f"{np.percentile(times[name], percentile):.1f}" for percentile in (50, 95, 99)]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {len(times[name])} |")
    paired = np.subtract(times["protected"], times["none"])
    total = {
        name: sum(getattr(counts, name) for counts in sent)
        for name in ("datagrams", "again", "copies", "must", "must_lost")
    }
    more = total["again"] + total["copies"]
    beside = f"Sent again {total['again']:,}, copies {total['copies']:,}"
    lines += [
        "",
        f"Protected minus not, pair by pair: median {np.median(paired):+.1f} ms.",
        f"Of {total['must']:,} packets of high priority {total['must_lost']} did not arrive.",
        f"{beside}: {100 * more / max(total['datagrams'] - more, 1):.2f} % more datagrams.",
    ]
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    share = "" if args.fraction == 0.01 else f"_top_{100 * args.fraction:g}"
    result = Path(args.out) / f"udp_priority_{100 * args.loss:g}_percent{share}_{today()}.md"
    with usage_errors("benchmarks.udp_priority"):
        if args.exchanges < 2:
            raise refuse("--exchanges", args.exchanges, "must be at least 2")
        if result.exists() and not args.replace:
            raise refuse("--out", result, "is there already; --replace writes over it")
        our_config(f"--grad-recovery error-feedback --grad-priority packet-mean:{args.fraction} {args.flags}")
        try:
            times, sent, notes = measure(args)
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
            return 0
    text = markdown(args, times, sent, [*made_with("benchmarks.udp_priority", argv), *notes])
    print("\n" + text)
    write_results(result.parent, result.stem, md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
