"""Time of a message over a lossy link, by scheme of recovery, measured and in the packet model (docs/fct.md).

    python -m benchmarks.fct_lab [--messages 400] [--loss 0 0.01 0.05] [--mebibytes 1 4] [--rate 100] [--rtt 20]

As root, on Linux (benchmarks/lab); elsewhere it says what is missing. Two nodes send a message to each other at the same
time, so that an exchange gives two completion times: from when the sender begins until the receiver has all that it
will get. The schemes take turns in rotating order, over connections that last. The model has the link's delay, rate and
loss, and each scheme's packets and headers; it has no congestion control, no reorder window and no processor.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.exchange.contestants import Team, our_config
from benchmarks.exchange.rows import Row
from benchmarks.exchange.timeouts import HEADER, PAYLOAD
from benchmarks.fct.schemes import Flow, Losses, Scheme, SelectiveRepeat, Smart, Uniform
from benchmarks.fct.schemes import Path as Way
from benchmarks.lab import Lab, Missing, end_in_order
from megatron_lossy.base.coding import AdaptiveCode
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.transport.udp.session import overhead

#: RTO of the schemes that have one, in round trips.
RTO = 2.0
_IP_UDP, _IP_TCP = 28, 52
_WARM_UP = 10
_PACE = 0.95  # of the link, for a sender without control: acknowledgements of the other direction need room
_LIMIT = 60.0
_MODEL_FLOWS = 2000


class OnTimeout(Scheme):
    """A sender that repeats a packet after each timeout until it is acknowledged."""

    def flow(self, path: Way, packets: int, losses: Losses) -> Flow:
        lost, _ = losses.first(packets, np.zeros(0, dtype=np.int64))
        tries = np.where(lost, losses.again(packets), 0)
        left = np.arange(1, packets + 1) * path.slot
        # In its own time, whatever else is sent then: the link is idle where that matters.
        arrived = left + tries * (self._rto(path) + path.slot) + path.latency
        return Flow(float(arrived.max()), packets, 0, int(tries.sum()))


@dataclass(frozen=True)
class Contestant:
    """A scheme: the team that runs it, and the model's ``scheme`` for a loss rate and a number of packets.

    ``payload``, ``headers``: bytes of its packets. ``flags``: of ours.
    """

    name: str
    team: str
    payload: int
    headers: int
    flags: str = ""

    def scheme(self, rate: float, packets: int) -> Scheme:
        """Return the scheme of the model."""
        if self.team == "tcp bbr":
            return SelectiveRepeat(RTO)
        if self.team == "timeouts":
            return OnTimeout(RTO)
        if "--udp-fec" in self.flags:
            return Uniform(100, 10, RTO)
        high = round(0.01 * packets)
        code = AdaptiveCode(budget=2.5)
        for _ in range(32):
            code.report(round(rate * packets), packets)
        return Smart(100, max(code.parity(high), 1), 0.01, RTO)


def contestants() -> list[Contestant]:
    """Return the contestants in the order of the tables."""
    headers = overhead("aes-128-gcm") + _IP_UDP
    uniform = "--grad-recovery zero --grad-priority packet-mean:1 --udp-fec 100 10"
    return [
        Contestant("on timeout", "timeouts", PAYLOAD, HEADER.size + _IP_UDP),
        Contestant("TCP BBR", "tcp bbr", 1448, _IP_TCP),
        Contestant("FEC (100,10)", "ours", PAYLOAD, headers, uniform),
        Contestant("top 1 %", "ours", PAYLOAD, headers, "--grad-recovery error-feedback"),
    ]


def row_of(args: argparse.Namespace, loss: float, mebibytes: float) -> Row:
    """Return the link, and a message of so many MiB over it."""
    return Row("fct", args.rtt, loss, mebibytes * 2**20 / 1e6, rate=args.rate)


Key = tuple[str, float, float]  # contestant, loss, MiB


def measure(args: argparse.Namespace, chosen: Sequence[Contestant]) -> tuple[dict[Key, list[float]], list[str]]:
    """Return milliseconds of every message."""
    times: dict[Key, list[float]] = {}
    sizes = {size: row_of(args, 0.0, size).shard for size in args.mebibytes}
    paces = {"timeouts": (_PACE * 1e6 * args.rate / 8, RTO * args.rtt / 1000)}
    with Lab(row_of(args, 0.0, args.mebibytes[0]).link(loss=False), seed=args.seed) as lab:
        lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
        lab.sysctl("net.ipv4.tcp_slow_start_after_idle", 0)  # its rate lasts, as that of the others does
        teams: dict[str, Team] = {}
        try:
            for one in chosen:
                config = paces.get(one.team) or our_config(f"--udp-rate {args.rate:g}mbit {one.flags}")
                teams[one.name] = Team(lab, one.team, 2, list(sizes.values()), config)
            for place, (loss, size) in enumerate((loss, size) for loss in args.loss for size in args.mebibytes):
                lab.set(row_of(args, loss, size).link(), seed=place)
                for turn in range(args.messages // 2 + _WARM_UP):
                    shift = turn % len(chosen)
                    for one in [*chosen[shift:], *chosen[:shift]]:
                        done = teams[one.name].exchange("reduce-scatter", sizes[size], _LIMIT)
                        if turn >= _WARM_UP:
                            took = [1000 * (done[rank].ended - done[1 - rank].started) for rank in range(2)]
                            times.setdefault((one.name, loss, size), []).extend(took)
                    print(f"\r{100 * loss:g} %, {size:g} MiB: {turn}\x1b[K", end="", file=sys.stderr, flush=True)
        finally:
            for team in teams.values():
                team.close()
        dropped = lab.dropped()
        print("\r\x1b[K", end="", file=sys.stderr)
    return times, [f"this machine dropped {dropped} packets itself"] if dropped else []


def predict(args: argparse.Namespace, chosen: Sequence[Contestant]) -> dict[Key, list[float]]:
    """Return milliseconds of the model's messages. The losses are every scheme's."""
    times = {}
    for one in chosen:
        # No hop but the link: the others take no time.
        way = Way(1e9, args.rate / 1000, 500 * args.rtt, 0.0, one.payload, one.headers)
        for loss in args.loss:
            for size in args.mebibytes:
                packets = way.packets(size * 2**20)
                scheme = one.scheme(loss, packets)
                flows = (scheme.flow(way, packets, Losses(loss, args.seed, flow)) for flow in range(_MODEL_FLOWS))
                times[one.name, loss, size] = [flow.time / 1000 for flow in flows]
    return times


def _three(times: Sequence[float]) -> list[float]:
    return [float(np.mean(times)), *(float(value) for value in np.percentile(times, [50, 99]))]


def markdown(
    args: argparse.Namespace,
    measured: Mapping[Key, list[float]],
    model: Mapping[Key, list[float]],
    header: Sequence[str],
) -> str:
    """Return the result, as text."""
    lines = ["# Completion times over an emulated link", "", *(f"- {line}" for line in header), "", "## Times", ""]
    return "\n".join([*lines, table(args, measured, model)]) + "\n"


def table(args: argparse.Namespace, measured: Mapping[Key, list[float]], model: Mapping[Key, list[float]]) -> str:
    """Return a table of milliseconds by message, loss and scheme, next to the model's."""
    each = len(next(iter(measured.values())))
    lines = [
        f"{args.rtt:g} ms, {args.rate:g} Mbit/s, {each} messages of each kind, {_MODEL_FLOWS:,} in the model. Milliseconds.",
        "",
        "| message | loss | scheme | mean | P50 | P99 | model: mean | P50 | P99 |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for size in args.mebibytes:
        for loss in args.loss:
            for name in (one.name for one in contestants()):
                numbers = [*_three(measured[name, loss, size]), *_three(model[name, loss, size])]
                cells = [f"{size:g} MiB", f"{100 * loss:g} %", name, *(f"{number:.1f}" for number in numbers)]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fct_lab", description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=400, metavar="N", help="of each kind (default 400)")
    parser.add_argument("--loss", type=float, nargs="+", default=[0.0, 0.01, 0.05], metavar="P", help="loss rates")
    parser.add_argument("--mebibytes", type=float, nargs="+", default=[1.0, 4.0], metavar="MIB", help="of a message")
    parser.add_argument("--rate", type=float, default=100.0, metavar="MBIT", help="of the link, Mbit/s (default 100)")
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round-trip time (default 20)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    folder = Path(args.out) / f"fct_lab_{today()}"
    with usage_errors("benchmarks.fct_lab"):
        if args.messages < 2:
            raise refuse("--messages", args.messages, "must be at least 2")
        for loss in args.loss:
            row_of(args, loss, args.mebibytes[0]).link()  # refuses impossible links
        if folder.exists() and not args.replace:
            raise refuse("--out", args.out, f"{folder.name} is there already; --replace writes over it")
        chosen = contestants()
        try:
            measured, notes = measure(args, chosen)
        except Missing as missing:
            print(f"skipped: {missing}")
            return 0
        model = predict(args, chosen)
    text = markdown(args, measured, model, [*made_with("benchmarks.fct_lab", argv), *notes])
    print("\n" + text)
    write_results(folder, "fct_lab", md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
