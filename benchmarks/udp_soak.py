"""Exchanges over UDP for a long time: does one stall, and do memory or open files grow?

    python -m benchmarks.udp_soak [--seconds 3600] [--exchanges 10000] [--loss 0.05] [--rtt 20] [--megabytes 1] [--trouble 10]

As root, on Linux (benchmarks/lab); elsewhere it says what is missing. Two ranks in two network namespaces make reduce-scatters
and all-gathers in turns. It ends after the exchanges or the seconds, whichever end later. Meanwhile a thread does
nothing but sleep for 5 ms at a time: when it oversleeps, the machine was busy with something else, and an exchange that
takes long at that moment is no evidence about the transport.

With ``--trouble S`` one way of the path is cut for 0.1 to 5 s every S seconds. An exchange goes on if it ends two round trips, 50 ms and twice its usual time after that.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
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
from benchmarks.lab import Lab, Link, MissingRequirement, end_in_order
from megatron_lossy.base.errors import refuse, usage_errors

#: An exchange that takes so many times the median is one that stalls.
STALL = 5.0
#: Exchanges of each phase in the beginning that find the rate, and are not counted.
WARM_UP = 20
#: Of an exchange: so much is not lost by chance.
MOST = 0.5
_LIMIT = 120.0
_OVERSLEPT = 0.05  # seconds
_LINES = 60


class Sleeper:
    """Notes when the machine does not run this process: intervals in which it overslept by :data:`_OVERSLEPT`."""

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
        """Return whether this process overslept between ``started`` and ``ended``."""
        return any(begin < ended and end > started for begin, end in self.gaps[-100:])

    def close(self) -> None:
        """Take no more notes."""
        self._end.set()
        self._thread.join()


@dataclass(frozen=True)
class Event:
    """Something that happened to the path from ``began`` to ``ended``, by the monotonic clock; ``kind``: in a few words."""

    kind: str
    began: float
    ended: float


class Trouble:
    """Lets something happen to ``link`` of ``lab`` every so many seconds, in a thread."""

    _CUT = 1 - 1e-9

    def __init__(self, lab: Lab, link: Link, every: float, seed: int) -> None:
        self.events: list[Event] = []
        self._lab, self._link, self._every = lab, link, every
        self._random = random.Random(seed)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._end.wait(self._every):
            began = time.monotonic()
            self._cut()
            self.events.append(Event("one way cut", began, time.monotonic()))

    def _cut(self) -> None:
        source, seconds = self._random.randrange(2), 0.1 * 50 ** self._random.random()
        self._lab.set(dataclasses.replace(self._link, loss=self._CUT, burst=None), source, 1 - source)
        self._end.wait(seconds)
        self._lab.set(self._link, source, 1 - source)

    def close(self) -> None:
        """Stop the cuts, and wait for the last one."""
        self._end.set()
        self._thread.join()


@dataclass(frozen=True)
class ExchangeRecord:
    """An exchange by the monotonic clock, and the share that it lost at the rank that lost more.

    ``disturbed``: the machine was busy with something else.
    """

    phase: str
    began: float
    ended: float
    lost: float
    disturbed: bool

    @property
    def took(self) -> float:
        """Milliseconds."""
        return 1000 * (self.ended - self.began)


@dataclass(frozen=True)
class Sample:
    """Resident MiB and open files of the largest rank, ``seconds`` after the start."""

    seconds: float
    exchanges: int
    resident: float
    files: int


def sample(team: Team, seconds: float, exchanges: int) -> Sample:
    """Return the memory and files of the ranks of ``team`` now."""
    ranks = [psutil.Process(pid) for pid in team.pids]
    resident = max(rank.memory_info().rss for rank in ranks) / 2**20
    return Sample(seconds, exchanges, resident, max(rank.num_fds() for rank in ranks))


@dataclass
class Run:
    """All that was seen. ``machine``: lines about this machine."""

    seen: list[ExchangeRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    machine: list[str] = field(default_factory=list)

    def took(self, phase: str) -> np.ndarray:
        """Return milliseconds of its exchanges."""
        return np.array([exchange.took for exchange in self.seen if exchange.phase == phase])


def soak(args: argparse.Namespace) -> Run:
    """Exchange for as long as is asked."""
    row = Row("soak", args.rtt, args.loss, args.megabytes, burst=args.burst)
    link = row.link()  # refuses impossible links
    run, trouble = Run(), None
    samples = run.samples
    with Lab(row.link(loss=False), seed=args.seed) as lab:
        sleeper, team = Sleeper(), Team(lab, "ours", 2, [row.shard], our_config(args.flags))
        try:
            lab.set(link, seed=args.seed)
            begun, done, every = time.monotonic(), 0, max(args.seconds / _LINES, 10.0)
            while (passed := time.monotonic() - begun) < args.seconds or done < args.exchanges:
                if args.trouble and done == 2 * WARM_UP:
                    trouble = Trouble(lab, link, args.trouble, args.seed)
                if done > 2 * WARM_UP and (not samples or passed - samples[-1].seconds >= every):
                    samples.append(sample(team, passed, done))
                    print(progress(samples[-1], run), flush=True)
                time.sleep(args.pause / 1000)
                phase = PHASES[done % 2]
                ranks = team.exchange(phase, row.shard, _LIMIT)
                done += 1
                if done > 2 * WARM_UP:
                    started, ended = span(ranks)
                    lost = max(rank.lost for rank in ranks)
                    run.seen.append(ExchangeRecord(phase, started, ended, lost, sleeper.overslept(started, ended)))
            samples.append(sample(team, time.monotonic() - begun, done))
        finally:
            if trouble is not None:
                trouble.close()
                run.events = trouble.events
            team.close()
            sleeper.close()
        longest = max((end - begin for begin, end in sleeper.gaps), default=0.0)
        slept = f"{len(sleeper.gaps)} times, {longest:.2f} s at most"
        run.machine = [
            f"Packets that this machine itself dropped: {lab.dropped()}",
            f"A thread that only sleeps overslept by {1000 * _OVERSLEPT:g} ms or more: {slept}",
        ]
        return run


def progress(now: Sample, run: Run) -> str:
    """Return a line for the terminal."""
    slowest = max((exchange.took for exchange in run.seen), default=0.0)
    return (
        f"{now.seconds:7.0f} s: {now.exchanges} exchanges, slowest {slowest:.0f} ms; "
        f"{now.resident:.1f} MiB, {now.files} files open"
    )


def on_again(run: Run, event: Event) -> float:
    """Return the milliseconds from the end of ``event`` to the end of an exchange that had not lost most."""
    ended = [exchange.ended for exchange in run.seen if exchange.ended >= event.ended and exchange.lost < MOST]
    return 1000 * (ended[0] - event.ended) if ended else float("inf")


def trouble_table(run: Run, rtt: float) -> list[str]:
    """Return a table of exchanges during each event of the path."""
    usual = max(float(np.median(run.took(phase))) for phase in PHASES)
    allowed = 2 * rtt + 50 + 2 * usual
    lines = [
        "",
        f"| what happened | times | until an exchange was over, ms: median | most | over {allowed:.0f} ms |",
        "| --- | --- | --- | --- | --- |",
    ]
    events = run.events[:-1]  # nothing may have come after the last
    for kind in sorted({event.kind for event in events}):
        waits = np.array([on_again(run, event) for event in events if event.kind == kind])
        lines.append(
            f"| {kind} | {len(waits)} | {np.median(waits):.0f} | {waits.max():.0f} | {(waits > allowed).sum()} |"
        )
    near = [(event.began, event.ended + max(1.0, on_again(run, event) / 1000)) for event in run.events]
    apart = [seen for seen in run.seen if not any(seen.began < end and seen.ended > begin for begin, end in near)]
    counts = sum(seen.lost > MOST for seen in run.seen), len(run.seen), sum(seen.lost > MOST for seen in apart)
    said = "exchanges lost more than {:.0%}: {} of {}; {} of them when nothing had happened for a second"
    lines += ["", f"{said.format(MOST, *counts).capitalize()}."]
    return lines


def markdown(run: Run, header: Sequence[str], rtt: float) -> str:
    """Return the result."""
    samples = run.samples
    lost = [exchange.lost for exchange in run.seen]
    first, last = samples[0], samples[-1]
    lines = ["# A long run over UDP", "", *[f"- {line}" for line in header], ""]
    lines += [
        f"| exchange | number | median, ms | P99 | P99.9 | slowest | over {STALL:g} medians | of these, the machine slept |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for phase in PHASES:
        took = run.took(phase)
        disturbed = np.array([exchange.disturbed for exchange in run.seen if exchange.phase == phase])
        tail = [f"{np.percentile(took, percent):.1f}" for percent in (50, 99, 99.9, 100)]
        stalls = took > STALL * np.median(took)
        lines.append(f"| {phase} | {len(took)} | {' | '.join(tail)} | {stalls.sum()} | {(stalls & disturbed).sum()} |")
    lines += [
        "",
        f"Lost on average: {np.mean(lost):.3%} at the rank that lost more, {max(lost):.1%} in the worst exchange.",
        *(trouble_table(run, rtt) if run.events else []),
        "",
        "| after | exchanges | resident memory, MiB | open files |",
        "| --- | --- | --- | --- |",
    ]
    shown = [samples[int(index)] for index in np.unique(np.linspace(0, len(samples) - 1, 7).round())]
    lines += [f"| {row.seconds:.0f} s | {row.exchanges} | {row.resident:.1f} | {row.files} |" for row in shown]
    lines += [
        "",
        f"From the first line to the last: {last.resident - first.resident:+.1f} MiB, {last.files - first.files:+d} files.",
    ]
    return "\n".join(lines) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
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
    parser.add_argument("--trouble", type=float, default=0.0, metavar="S", help="something happens so often (0: never)")
    parser.add_argument("--flags", default="", help="more loss flags, as one word: '--udp-key-file none'")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors("benchmarks.udp_soak"):
        if not args.pause >= 0:
            raise refuse("--pause", args.pause, "must be milliseconds of at least 0")
        if not (args.seconds >= 0 and args.exchanges >= 2 * WARM_UP + 2):
            raise refuse("--exchanges", args.exchanges, f"must be at least {2 * WARM_UP + 2}")
        if not args.trouble >= 0:
            raise refuse("--trouble", args.trouble, "must be seconds of at least 0")
        trouble = "_trouble" * (args.trouble > 0)
        result = Path(args.out) / f"udp_soak_{100 * args.loss:g}_percent{trouble}_{today()}.md"
        if result.exists() and not args.replace:
            raise refuse("--out", args.out, f"{result.name} is there already; --replace writes over it")
        try:
            run = soak(args)
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
            return 0
    text = markdown(run, [*made_with("benchmarks.udp_soak", argv), *run.machine], args.rtt)
    print("\n" + text)
    write_results(result.parent, result.stem, md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
