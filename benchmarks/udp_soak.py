"""Exchanges over UDP for a long time: does one stall, and do memory or open files grow?

    python -m benchmarks.udp_soak [--seconds 3600] [--exchanges 10000] [--loss 0.05] [--rtt 20] [--megabytes 1]

As root, on Linux (benchmarks/lab); elsewhere it says what is missing. Two ranks in two network namespaces make reduce-scatters
and all-gathers in turns. It ends after the exchanges or the seconds, whichever are over later. Meanwhile a thread does
nothing but sleep for 5 ms at a time: when it oversleeps, the machine was busy with something else, and an exchange that
takes long at that moment says nothing about the transport.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.exchange.contestants import PHASES, Team, our_config, span
from benchmarks.exchange.rows import Row
from benchmarks.lab import Lab, Missing, end_in_order
from megatron_lossy.errors import refuse, usage_errors

#: An exchange that takes so many times the median is one that stalls.
STALL = 5.0
#: Exchanges of each phase in the beginning that find the rate, and are not counted.
WARM_UP = 20
_LIMIT = 120.0
_OVERSLEPT = 0.05  # seconds
_LINES = 60


class Sleeper:
    """Notes when the machine does not run who wants to run: intervals in which it overslept by :data:`_OVERSLEPT`."""

    def __init__(self) -> None:
        self.gaps: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sleep, daemon=True)
        self._thread.start()

    def _sleep(self) -> None:
        before = time.monotonic()
        while not self._end.wait(0.005):
            now = time.monotonic()
            if now - before > _OVERSLEPT:
                self.gaps.append((before, now))
            before = now

    def overslept(self, started: float, ended: float) -> bool:
        """Whether it did between ``started`` and ``ended``."""
        return any(begin < ended and end > started for begin, end in self.gaps[-100:])

    def close(self) -> None:
        """No more notes."""
        self._end.set()
        self._thread.join()


@dataclass
class Times:
    """Of the exchanges of one phase: milliseconds, and whether the machine was busy with something else."""

    took: list[float] = field(default_factory=list)
    disturbed: list[bool] = field(default_factory=list)


@dataclass(frozen=True)
class Sample:
    """What the ranks hold, ``seconds`` after the start: resident MiB and open files of the one that has more."""

    seconds: float
    exchanges: int
    resident: float
    files: int


def sample(team: Team, seconds: float, exchanges: int) -> Sample:
    """What the ranks of ``team`` hold now."""
    ranks = [psutil.Process(pid) for pid in team.pids]
    resident = max(rank.memory_info().rss for rank in ranks) / 2**20
    return Sample(seconds, exchanges, resident, max(rank.num_fds() for rank in ranks))


def soak(args: argparse.Namespace) -> tuple[dict[str, Times], list[float], list[Sample], list[str]]:
    """The times by phase, shares lost, samples, and lines about this machine."""
    row = Row("soak", args.rtt, args.loss, args.megabytes, burst=args.burst)
    link = row.link()  # refuses what no link can be
    times = {phase: Times() for phase in PHASES}
    lost: list[float] = []
    samples: list[Sample] = []
    with Lab(row.link(loss=False), seed=args.seed) as lab:
        sleeper, team = Sleeper(), Team(lab, "ours", 2, [row.shard], our_config(args.flags))
        try:
            lab.set(link, seed=args.seed)
            begun, done, every = time.monotonic(), 0, max(args.seconds / _LINES, 10.0)
            while (passed := time.monotonic() - begun) < args.seconds or done < args.exchanges:
                if done > 2 * WARM_UP and (not samples or passed - samples[-1].seconds >= every):
                    samples.append(sample(team, passed, done))
                    print(progress(samples[-1], times), flush=True)
                time.sleep(args.pause / 1000)
                phase = PHASES[done % 2]
                ranks = team.exchange(phase, row.shard, _LIMIT)
                done += 1
                if done > 2 * WARM_UP:
                    started, ended = span(ranks)
                    times[phase].took.append(1000 * (ended - started))
                    times[phase].disturbed.append(sleeper.overslept(started, ended))
                    lost.append(float(np.mean([one.lost for one in ranks])))
            samples.append(sample(team, time.monotonic() - begun, done))
        finally:
            team.close()
            sleeper.close()
        longest = max((end - begin for begin, end in sleeper.gaps), default=0.0)
        slept = f"{len(sleeper.gaps)} times, {longest:.2f} s at most"
        machine = [
            f"Packets that this machine itself dropped: {lab.dropped()}",
            f"A thread that only sleeps overslept by {1000 * _OVERSLEPT:g} ms or more: {slept}",
        ]
        return times, lost, samples, machine


def progress(now: Sample, times: dict[str, Times]) -> str:
    """A line for the terminal."""
    slowest = max(max(of_phase.took, default=0.0) for of_phase in times.values())
    return (
        f"{now.seconds:7.0f} s: {now.exchanges} exchanges, slowest {slowest:.0f} ms; "
        f"{now.resident:.1f} MiB, {now.files} files open"
    )


def markdown(times: dict[str, Times], lost: Sequence[float], samples: Sequence[Sample], header: Sequence[str]) -> str:
    """The result."""
    first, last = samples[0], samples[-1]
    lines = ["# A long run over UDP", "", *[f"- {line}" for line in header], ""]
    lines += [
        f"| exchange | number | median, ms | P99 | P99.9 | slowest | over {STALL:g} medians | of these, the machine slept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for phase, of_phase in times.items():
        took, disturbed = np.array(of_phase.took), np.array(of_phase.disturbed)
        tail = [f"{np.percentile(took, percent):.1f}" for percent in (50, 99, 99.9, 100)]
        stalls = took > STALL * np.median(took)
        lines.append(f"| {phase} | {len(took)} | {' | '.join(tail)} | {stalls.sum()} | {(stalls & disturbed).sum()} |")
    lines += [
        "",
        f"Lost on average: {np.mean(lost):.3%} of what was sent to a rank, {max(lost):.1%} in the worst exchange.",
        "",
        "| after | exchanges | resident memory, MiB | open files |",
        "| --- | --- | --- | --- |",
    ]
    shown = [samples[int(index)] for index in np.unique(np.linspace(0, len(samples) - 1, 7).round())]
    lines += [f"| {one.seconds:.0f} s | {one.exchanges} | {one.resident:.1f} | {one.files} |" for one in shown]
    lines += [
        "",
        f"From the first line to the last: {last.resident - first.resident:+.1f} MiB, {last.files - first.files:+d} files.",
    ]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.udp_soak", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="at least so long (default 0)")
    parser.add_argument("--exchanges", type=int, default=10_000, metavar="N", help="at least so many (default 10000)")
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round-trip time (default 20)")
    parser.add_argument("--loss", type=float, default=0.05, metavar="P", help="share of packets lost (default 0.05)")
    parser.add_argument("--burst", type=float, metavar="N", help="mean packets lost in a row (default: independent)")
    parser.add_argument(
        "--megabytes", type=float, default=1.0, metavar="MB", help="that a rank sends in an exchange (default 1)"
    )
    parser.add_argument("--pause", type=float, default=0.0, metavar="MS", help="between exchanges (default 0)")
    parser.add_argument("--flags", default="", help="more loss flags, as one word: '--udp-cipher none'")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors("benchmarks.udp_soak"):
        if not args.pause >= 0:
            raise refuse("--pause", args.pause, "must be milliseconds of at least 0")
        if not (args.seconds >= 0 and args.exchanges >= 2 * WARM_UP + 2):
            raise refuse("--exchanges", args.exchanges, f"must be at least {2 * WARM_UP + 2}")
        result = Path(args.out) / f"udp_soak_{100 * args.loss:g}_percent_{today()}.md"
        if result.exists() and not args.replace:
            raise refuse("--out", args.out, f"{result.name} is there already; --replace writes over it")
        try:
            times, lost, samples, machine = soak(args)
        except Missing as missing:
            print(f"skipped: {missing}")
            return 0
    text = markdown(times, lost, samples, [*made_with("benchmarks.udp_soak", argv), *machine])
    print("\n" + text)
    write_results(result.parent, result.stem, md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
