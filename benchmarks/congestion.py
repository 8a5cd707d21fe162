"""Effect of ``--udp-rate`` on a bottleneck and other flows, in a packet model with the engine's own rate control.

    python -m benchmarks.congestion [--rules shared dedicated] [--seeds 3] [--only TEXT] [--out benchmarks/results]

Own loss is packets that do not fit the queue, without those that the path loses. Flows of ours send exchanges of 4 to
40 MB with pauses of 10 to 300 ms, except next to TCP, where fairness is measured, and where the path changes: there
they send without end. The model has neither a scheduler nor a machine that is busy.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.lab.bottleneck import Bottleneck, Flow, run


@dataclass(frozen=True)
class Row:
    """A requirement: values of ``measure(rule, seed)`` in percent, or seconds, and what they should be."""

    name: str
    unit: str
    measure: Callable[[str, int], list[float]]
    least: float = 0.0
    most: float = float("inf")

    @property
    def target(self) -> str:
        if self.most == float("inf"):
            return f"at least {self.least:g} {self.unit}"
        return f"{self.least:g} to {self.most:g} {self.unit}" if self.least else f"at most {self.most:g} {self.unit}"

    def cell(self, runs: Sequence[Sequence[float]]) -> str:
        """Return the medians of each path's ``runs`` [seeds][paths], and all values; "missed" if one is off target."""
        medians = [statistics.median(values) for values in zip(*runs)]
        every = [value for values in runs for value in values]
        missed = not all(self.least <= value <= self.most for value in medians)
        return f"{_span(medians)} ({_span(every)}){' missed' * missed}"


def _span(values: Sequence[float]) -> str:
    low, high = (f"{value:.1f}".replace("inf", "never") for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def own_loss(flows: int, *paths: Bottleneck) -> Callable[[str, int], list[float]]:
    """Return own loss of ``flows`` that begin together, percent."""

    def measure(rule: str, seed: int) -> list[float]:
        seconds = {path: 12 if path.mbit * flows <= 1600 else 8 for path in paths}
        return [100 * run(path, [Flow(rule)] * flows, seconds=seconds[path], seed=seed).own_loss() for path in paths]

    return measure


def use(*paths: Bottleneck, seconds: float = 20, flows: int = 1) -> Callable[[str, int], list[float]]:
    """Return the use of a link by ``flows``, in percent, from 5 seconds after their beginning."""

    def measure(rule: str, seed: int) -> list[float]:
        return [100 * run(path, [Flow(rule)] * flows, seconds=seconds, warm=5, seed=seed).used for path in paths]

    return measure


def beside(kind: str, *paths: Bottleneck) -> Callable[[str, int], list[float]]:
    """Return the rate of a TCP flow next to one of ours, in percent of its rate alone."""

    def measure(rule: str, seed: int) -> list[float]:
        values = []
        for path in paths:
            alone = run(path, [Flow(kind)], seconds=40, warm=8, seed=seed).delivered[0]
            both = run(path, [Flow(rule, endless=True), Flow(kind)], seconds=40, warm=8, seed=seed)
            values.append(100 * both.delivered[-1] / alone)
        return values

    return measure


def evenness(*paths: Bottleneck) -> Callable[[str, int], list[float]]:
    """Return the rate of the slowest of 16 flows to one host, in percent of that of the fastest."""

    def measure(rule: str, seed: int) -> list[float]:
        flows = [Flow(rule, endless=True, group=0, begin=0.1 * index) for index in range(16)]
        got = [run(path, flows, seconds=20, warm=5, seed=seed).delivered for path in paths]
        return [100 * rates.min() / rates.max() for rates in got]

    return measure


def change(mbit: float, rtt: float, *paths: Bottleneck) -> Callable[[str, int], list[float]]:
    """Return seconds until a flow has 80 % of a path that has changed, on average over half a second."""

    def measure(rule: str, seed: int) -> list[float]:
        values = []
        for path in paths:
            at, interval = 5 + 0.13 * seed, 0.1
            changed = Bottleneck(path.mbit, path.rtt, path.queue, steps=((at, mbit, rtt),))
            trace = run(changed, [Flow(rule, endless=True)], seconds=at + 6, warm=0, seed=seed, interval=interval).trace
            share = trace[int(at / interval) + 1 :, 0, 0] / interval / (mbit * 1e6 / 8)
            good = [k for k in range(len(share) - 5) if share[k : k + 5].mean() >= 0.8]
            values.append(interval * good[0] if good else math.inf)
        return values

    return measure


def rows() -> list[Row]:
    """Return the requirements: own loss, use, others, changes."""
    near = [Bottleneck(100, 1, 1), Bottleneck(100, 20, 2), Bottleneck(1000, 1, 1), Bottleneck(1000, 20, 2)]
    far = [Bottleneck(100, 100, 2), Bottleneck(1000, 100, 2)]
    return [
        *(Row(f"own loss, {n} flows, 100 and 1,000 Mbit/s, RTT 1 and 20 ms, queue 1 and 2 ms", "%", own_loss(n, *near), most=2.5) for n in (1, 4, 16)),
        *(Row(f"own loss, {n} flows, RTT 100 ms, queue 2 ms", "%", own_loss(n, *far), most=4) for n in (1, 4, 16)),
        Row("own loss, 64 flows, 1,000 Mbit/s, RTT 20 ms, queue 2 ms", "%", own_loss(64, Bottleneck(1000, 20, 2)), most=2.5),
        Row("own loss, one flow, 10 Mbit/s, queue 2 and 5 ms", "%", own_loss(1, Bottleneck(10, 20, 2), Bottleneck(10, 20, 5)), most=2),
        Row("own loss, 16 into 1, 1,000 Mbit/s, RTT and queue 1 ms", "%", incast, most=2),
        Row("use of a clean 1,000 Mbit/s, RTT 1 and 20 ms", "%", use(Bottleneck(1000, 1, 1), Bottleneck(1000, 20, 2), seconds=12), least=85),
        Row("use at 10 % of loss, 100 and 1,000 Mbit/s", "%", use(Bottleneck(loss=0.1), Bottleneck(1000, loss=0.1)), least=90),
        Row("use at 20 % of loss, 100 Mbit/s", "%", use(Bottleneck(loss=0.2)), least=85),
        Row("use at 0.1 and 1 % of loss, 100 and 1,000 Mbit/s", "%", use(*(Bottleneck(mbit, loss=loss) for mbit in (100, 1000) for loss in (0.001, 0.01))), least=60),
        Row("use at 0.1, 1 and 10 % of loss, 1,000 Mbit/s, RTT 100 ms", "%", use(*(Bottleneck(1000, 100, loss=loss) for loss in (0.001, 0.01, 0.1))), least=60),
        Row("use at 10 % of loss, 16 flows, 100 Mbit/s", "%", use(Bottleneck(loss=0.1), flows=16), least=60),
        Row("use of a clean link, 16 flows, 100 and 1,000 Mbit/s", "%", use(Bottleneck(), Bottleneck(1000), flows=16), least=85),
        Row("use at 10 % of loss, 10 and 24 Mbit/s", "%", use(Bottleneck(10, loss=0.1), Bottleneck(24, loss=0.1)), least=60),
        Row("use at 10 % of loss in bursts of 8, 100 Mbit/s", "%", use(Bottleneck(loss=0.1, burst=8)), least=60),
        Row("Cubic next to us, RTT 20 ms, queue 2, 20, 100 ms", "%", beside("cubic", *(Bottleneck(queue=queue) for queue in (2, 20, 100))), least=35, most=65),
        Row("Cubic next to us, with jitter of 2 ms, queue 2 and 20 ms", "%", beside("cubic", *(Bottleneck(queue=queue, jitter=2) for queue in (2, 20))), least=35, most=65),
        Row("Reno next to us, RTT 20 ms, queue 2, 20, 100 ms", "%", beside("reno", *(Bottleneck(queue=queue) for queue in (2, 20, 100))), least=25),
        Row("Cubic next to us, RTT 100 ms, queue 20 and 100 ms", "%", beside("cubic", Bottleneck(rtt=100, queue=20), Bottleneck(rtt=100, queue=100)), least=25),
        Row("Cubic next to us, RTT 100 ms, queue 2 ms", "%", beside("cubic", Bottleneck(rtt=100)), least=25),
        Row("least over largest of 16 flows to one host, RTT 1 and 20 ms", "%", evenness(Bottleneck(100, 1, 1), Bottleneck(100, 20, 2), Bottleneck(1000, 20, 2)), least=60),
        *(Row(f"own loss, the same flows, 100 Mbit/s, RTT 20 ms, clocks up to {skew:,} ms apart", "%", joining(skew), most=2.5) for skew in (10, 50, 2000)),
        Row("1,000 to 100 Mbit/s, queue 2 ms and 100 ms", "s", change(100, 20, Bottleneck(1000, 20, 2), Bottleneck(1000, 20, 100)), most=1),
        Row("100 to 1,000 Mbit/s", "s", change(1000, 20, Bottleneck()), most=1.5),
        Row("RTT 20 to 30 ms, 100 Mbit/s", "s", change(100, 30, Bottleneck()), most=1.5),
        Row("RTT 20 to 30 ms, 1,000 Mbit/s", "s", change(1000, 30, Bottleneck(1000)), most=1.5),
    ]  # fmt: skip


def joining(skew: float) -> Callable[[str, int], list[float]]:
    """Return the own loss (percent) of 16 endless flows that begin in turn; clocks differ by up to ``skew`` ms."""

    def measure(rule: str, seed: int) -> list[float]:
        flows = [Flow(rule, endless=True, group=0, begin=0.1 * index) for index in range(16)]
        return [100 * run(Bottleneck(skew=skew), flows, seconds=20, warm=5, seed=seed).own_loss()]

    return measure


def incast(rule: str, seed: int) -> list[float]:
    """Return own loss of 16 flows to one host, percent."""
    flows = [Flow(rule, group=0)] * 16
    return [100 * run(Bottleneck(1000, 1, 1), flows, seconds=8, seed=seed).own_loss()]


def main(argv: Sequence[str] | None = None) -> None:
    """Write a table of all requirements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rules", nargs="+", default=["shared", "dedicated"], choices=["shared", "dedicated"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="rows that have it in their name")
    parser.add_argument("--out", default=RESULTS)
    arguments = parser.parse_args(argv)
    lines = [
        f"# Rates on a shared link, in a packet model, {today()}",
        "",
        *made_with("benchmarks.congestion", sys.argv[1:] if argv is None else argv),
        "",
        (
            f"The median of {arguments.seeds} runs, from the path with the least to that with the greatest; in brackets the least "
            "and the greatest run of all. Own loss does not include that of the path."
        ),
        "",
        "| requirement | target | " + " | ".join(f"`{rule}`" for rule in arguments.rules) + " |",
        "| --- " * (2 + len(arguments.rules)) + "|",
    ]
    for row in (row for row in rows() if arguments.only in row.name):
        cells = []
        for rule in arguments.rules:
            cells.append(row.cell([row.measure(rule, seed) for seed in range(1, arguments.seeds + 1)]))
        lines.append(f"| {row.name} | {row.target} | " + " | ".join(cells) + " |")
        print(lines[-1], flush=True)
    write_results(arguments.out, f"congestion_{today()}", md="\n".join(lines) + "\n")
    if not arguments.only:
        plot(Path(arguments.out, f"congestion_{today()}.png"), arguments.seeds)


def plot(path: Path, seeds: int) -> None:
    """Draw the share of its rate alone that a Cubic flow keeps next to others, over the depth of the queue."""
    queues = (1, 2, 5, 10, 20, 50, 100)
    others = {
        "another Cubic flow": [Flow("cubic")],
        "shared, 1 flow": [Flow(endless=True)],
        "shared:4": [Flow(endless=True, as_flows=4)],
        "dedicated, 1 flow": [Flow("dedicated", endless=True)],
    }
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for (name, flows), line in zip(others.items(), ("--", "-", "-", ":")):
        kept = [[_kept(Bottleneck(queue=queue), flows, seed) for seed in range(1, seeds + 1)] for queue in queues]
        axes.plot(queues, [statistics.median(values) for values in kept], line, marker="o", markersize=4, label=name)
    axes.set_xscale("log")
    axes.set_xticks(queues, [str(queue) for queue in queues])
    axes.minorticks_off()
    axes.set_ylim(0, 105)
    axes.set_xlabel("queue of the bottleneck (ms)")
    axes.set_ylabel("share of its rate alone that Cubic keeps (%)")
    axes.set_title("One Cubic flow on 100 Mbit/s and 20 ms, next to", loc="left")
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _kept(path: Bottleneck, flows: Sequence[Flow], seed: int) -> float:
    """Return the rate of Cubic next to ``flows``, in percent of its rate alone."""
    alone, beside = (run(path, [*some, Flow("cubic")], seconds=40, warm=8, seed=seed) for some in ([], flows))
    return 100 * beside.delivered[-1] / alone.delivered[0]


if __name__ == "__main__":
    main()
