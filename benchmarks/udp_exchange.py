"""Time of an exchange over a lossy link: gloo, plain TCP and the transport over UDP, in one run over an emulated link.

    python -m benchmarks.udp_exchange [--quick] [--parts grid rate …] [--rtt 20] [--loss 0.01] [--megabytes 4]

As root, on Linux (benchmarks/lab); elsewhere it says what is missing. The contestants take turns in rotating order.
Two quantities are timed, each by itself: a reduce-scatter, and an all-gather. In both a rank sends the megabytes of the
row, and the time is that from the last rank's start to the last rank's end. Connections are made while nothing is lost
yet, and last as long as the link keeps its delay and its rate.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.exchange.contestants import NAMES, PHASES, ExchangeTimeout, RankTimes, Team, our_config
from benchmarks.exchange.limits import best, limits, limits_table
from benchmarks.exchange.results import Cell, Share, markdown, table_of
from benchmarks.exchange.rows import PARTS, Row, choose
from benchmarks.lab import Counters, Lab, Link, MissingRequirement, check_lab, end_in_order
from megatron_lossy.base.errors import refuse, usage_errors

#: Exchanges of a phase that a row has at most, and those that it has although they take longer than its share.
MOST, LEAST = 200, 3
SHARES = ("ours, ours", "ours, tcp bbr", "tcp bbr, tcp bbr")


class Field:
    """The contestants of one run, connected for one setting at a time."""

    def __init__(self, lab: Lab, names: Sequence[str], configs: dict[str, Any]) -> None:
        self._lab, self._names, self._configs = lab, names, configs
        self._teams: dict[str, Team] = {}
        self._slow: dict[str, list[Row]] = {}

    def connect(self, row: Row, shards: Sequence[int]) -> None:
        """Make new connections for the setting of ``row``."""
        self.close()
        self._slow = {name: [] for name in self._names}
        self._shards = shards
        for name in self._names:
            self._start(name, row)

    def _start(self, name: str, row: Row) -> None:
        if not row.wire:
            self._lab.set(row.link(loss=False))
        if name != "ours":
            control = name.split()[1]
            self._lab.sysctl("net.ipv4.tcp_congestion_control", control)
        config = self._configs.get(name.split()[0])
        self._teams[name] = Team(self._lab, name, row.ranks, self._shards, config)

    def measure(self, row: Row, seconds: float, limit: float, seed: int) -> list[Cell]:
        """Let the contestants take turns for about ``seconds``; a cell for each of them and each phase."""
        cells = {name: [Cell(row, name, phase) for phase in PHASES] for name in self._names}
        running = []
        for name in self._names:
            if any(row.loss >= slow.loss and row.megabytes >= slow.megabytes for slow in self._slow[name]):
                for cell in cells[name]:
                    cell.too_slow = limit
            else:
                if name not in self._teams:
                    self._start(name, row)
                running.append(name)
        if not row.wire:
            self._lab.set(row.link(), seed=seed)
        share = seconds / len(self._names)
        spent = dict.fromkeys(running, 0.0)
        for turn in range(MOST + 1):
            shift = turn % len(running) if running else 0
            for name in running[shift:] + running[:shift]:
                started = time.monotonic()
                try:
                    outcomes = [self._once(cell, limit) for cell in cells[name]]
                except ExchangeTimeout:
                    for cell in cells[name]:
                        cell.too_slow = limit
                    self._slow[name].append(row)
                    self._teams.pop(name).close()
                    running.remove(name)
                    continue
                spent[name] += time.monotonic() - started
                # The first exchange finds its rate; one that lasts has time for that.
                if turn > 0 or spent[name] > share:
                    for cell, outcome in zip(cells[name], outcomes):
                        cell.add(*outcome)
                if spent[name] > (share if turn >= LEAST else 2 * share):
                    running.remove(name)
            print(f"\r{row}: round {turn}", end="\033[K", file=sys.stderr, flush=True)
            if not running:
                break
        print("\r", end="\033[K", file=sys.stderr, flush=True)
        return [cell for of_name in cells.values() for cell in of_name]

    def _once(self, cell: Cell, limit: float) -> tuple[list[RankTimes], list[Counters]]:
        """Run one exchange; return the ranks' results, and the link's counters in each direction."""
        ends = [] if cell.row.wire else [(0, 1), (1, 0)]
        before = [self._lab.counters(*end) for end in ends]
        done = self._teams[cell.name].exchange(cell.phase, cell.row.shard, limit)
        return done, [self._lab.counters(*end).since(old) for end, old in zip(ends, before)]

    def close(self) -> None:
        """End all contestants."""
        for team in self._teams.values():
            team.close()
        self._teams.clear()


def available(lab: Lab, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return ``names`` with the congestion control that this kernel has, and a line for each that it lacks."""
    there, allowed = (
        lab.nodes[0].sysctl(f"net.ipv4.tcp_{which}_congestion_control").split() for which in ("available", "allowed")
    )
    chosen, lines = [], []
    for name in names:
        words = name.split()
        if len(words) == 2 and words[1] not in there:
            lines.append(f"no {words[1]} here (modprobe tcp_{words[1]}): {words[0]} runs with cubic instead")
            words[1] = "cubic"
        if len(words) == 2 and words[1] not in allowed:
            lines.append(
                f"{words[1]} is not allowed here (net.ipv4.tcp_allowed_congestion_control): no {' '.join(words)}"
            )
            continue
        if " ".join(words) not in chosen:
            chosen.append(" ".join(words))
    return chosen, lines


def share(lab: Lab, pair: str, seconds: float, config: Any) -> Share:
    """Return the shares of two flows without a pause over a link of 400 Mbit/s, 20 ms and 1 BDP of queue."""
    row = Row("shares", 20, 0, 40, rate=400, queue=20)
    lab.set(row.link(loss=False))
    lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
    names = pair.split(", ")
    with contextlib.ExitStack() as stack:
        teams = []
        for name in names:
            teams.append(Team(lab, name, 2, [row.shard], config))
            stack.callback(teams[-1].close)
        lab.set(row.link())
        start = time.monotonic() + 2.0  # both have found their rate by then
        end = start + seconds
        sent = [0.0] * len(teams)

        def flow(index: int) -> None:
            while (begun := time.monotonic()) < end:
                teams[index].exchange("reduce-scatter", row.shard, 10 * seconds)
                ended = time.monotonic()
                inside = min(ended, end) - max(begun, start)  # of an exchange that the interval cuts, its part
                sent[index] += row.megabytes * max(inside, 0.0) / (ended - begun)

        with ThreadPoolExecutor() as threads:
            list(threads.map(flow, range(len(teams))))
    return Share(names, [8 * megabytes / seconds for megabytes in sent], row)


def run(args: argparse.Namespace) -> tuple[list[Cell], list[Share], list[str]]:
    """Run everything that was asked for; return it, and lines about missing parts."""
    names, notes = args.contestants, []
    configs = {"ours": our_config(args.flags), "stream": our_config(args.stream_flags, "stream")}
    rows = choose(args.parts, args.rtt, args.loss, args.megabytes, args.quick)
    cells, shares = [], []
    for (wire, offload), of_wire in itertools.groupby(rows, key=lambda row: (row.wire, row.offload)):
        with Lab(None if wire else Link(), seed=args.seed, offload=offload) as lab, contextlib.ExitStack() as stack:
            chosen, lines = available(lab, names)
            notes += [line for line in lines if line not in notes]
            field = Field(lab, chosen, configs)
            stack.callback(field.close)
            for _, of_setting in itertools.groupby(of_wire, key=lambda row: row.setting):
                group = list(of_setting)
                field.connect(group[0], sorted({row.shard for row in group}))
                for row in group:
                    dropped = lab.dropped()
                    measured = field.measure(row, args.seconds, args.limit, args.seed)
                    if lab.dropped() > dropped:
                        notes.append(f"{row}: this machine dropped {lab.dropped() - dropped} packets itself")
                    cells += measured
                    print("\n".join(map(str, measured)), flush=True)
    if "shares" in args.parts and not args.quick:
        with Lab(Link(), seed=args.seed) as lab:
            for pair in SHARES:
                if all(name in names for name in pair.split(", ")):
                    shares.append(share(lab, pair, args.share_seconds, configs["ours"]))
                    print(shares[-1], flush=True)
    return cells, shares, notes


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.udp_exchange", description=__doc__.splitlines()[0])
    parts = [*PARTS, "shares"]
    parser.add_argument("--quick", action="store_true", help="three rows, in about a minute")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="groups of rows (default: all)")
    parser.add_argument("--rtt", type=float, nargs="+", metavar="MS", help="only rows with these")
    parser.add_argument("--loss", type=float, nargs="+", metavar="P", help="only rows with these, such as 0.01")
    parser.add_argument("--megabytes", type=float, nargs="+", metavar="MB", help="only rows with these")
    parser.add_argument("--contestants", nargs="+", choices=NAMES, default=NAMES, help="default: all")
    parser.add_argument("--flags", default="", help="more loss flags of ours, as one word: '--udp-key-file none'")
    parser.add_argument("--stream-flags", default="", help="the same of streams: '--udp-deadline off'")
    parser.add_argument("--seconds", type=float, metavar="S", help="for each row (default 30; quick: 8)")
    parser.add_argument("--limit", type=float, default=20.0, metavar="S", help="for one exchange (default 20)")
    parser.add_argument(
        "--share-seconds", type=float, default=15.0, metavar="S", help="for two flows that share a link"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    args.seconds = args.seconds or (8.0 if args.quick else 30.0)
    with usage_errors("benchmarks.udp_exchange"):
        stem = f"udp_exchange_{today()}"
        if Path(args.out, f"{stem}.md").exists() and not args.replace:
            raise refuse("--out", args.out, f"{stem}.md is there already; --replace writes over it")
        try:
            check_lab()
            packet_bytes = our_config(args.flags).packet_bytes
            before = limits(packet_bytes)
            cells, shares, notes = run(args)
            last = limits_table(packet_bytes, best(before, limits(packet_bytes)))
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
            return 0
        text = markdown(cells, shares, notes, made_with("benchmarks.udp_exchange", argv), last)
        print("\n" + text)
        write_results(args.out, stem, md=text, csv=table_of(cells))
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
