"""Share of a link that a real TCP flow keeps next to exchanges over UDP, by the depth of the queue.

    python -m benchmarks.beside_tcp [--seconds 12] [--seeds 3] [--rules shared,dedicated]

As root, on Linux (benchmarks/lab). One TCP flow of the kernel, Cubic or BBR, sends as much as it can from one namespace to
another over an emulated link of 100 Mbit/s with a round trip of 20 ms: alone, next to another flow of its kind, and
next to two ranks that exchange without a pause over the same link. This measures the kernel's own Cubic, which
benchmarks.congestion models; BBR has no model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import RESULTS, made_with, today, write_results
from benchmarks.exchange.contestants import Team, our_config
from benchmarks.lab import Lab, Link, MissingRequirement, end_in_order
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.transport.udp.library import RULES

#: Of TCP, as the kernel calls it: its name.
CONTROLS = {"cubic": "Cubic", "bbr": "BBR"}
QUEUES = (1, 2, 5, 10, 20, 50, 100)  # ms
RATE, ROUND_TRIP = 100e6, 0.020
ANOTHER = "another of its kind"
_SHARD = 1 << 18  # elements: 1 MB, 84 ms of the link
_LIMIT = 120.0
_WARM = 1 / 3  # of the seconds, which are not counted: the flows find their shares


class Tcp:
    """A TCP flow from node 0 of ``lab`` to node 1 that is never short of data; threads of this process send and receive."""

    def __init__(self, lab: Lab, control: str) -> None:
        self.received = 0
        with lab.nodes[1].do(socket.create_server, (lab.address(1), 0)) as server:
            self._sender = lab.nodes[0].do(self._connect, control, server.getsockname())
            self._receiver, _ = server.accept()
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._send, self._receive)]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _connect(control: str, address: tuple[str, int]) -> socket.socket:
        sender = socket.socket()
        sender.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
        sender.connect(address)
        return sender

    def _send(self) -> None:
        data = bytes(1 << 16)
        with contextlib.suppress(OSError):
            while True:
                self._sender.sendall(data)

    def _receive(self) -> None:
        with contextlib.suppress(OSError):
            while count := len(self._receiver.recv(1 << 18)):
                self.received += count

    def close(self) -> None:
        """End it."""
        for end in (self._sender, self._receiver):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        for thread in self._threads:
            thread.join()


@contextlib.contextmanager
def exchanging(lab: Lab, rule: str) -> Iterator[None]:
    """Return a context in which two ranks exchange by ``rule``."""
    team = Team(lab, "ours", 2, [_SHARD], our_config(f"--udp-rate {rule}"))
    end = threading.Event()

    def work() -> None:
        while not end.is_set():
            team.exchange("reduce-scatter", _SHARD, _LIMIT)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        team.close()


def carried(control: str, queue: float, other: str | None, seconds: float, seed: int) -> float:
    """Return the bit/s of a flow of ``control`` next to ``other``, over a link with a queue of ``queue`` ms."""
    link = Link(delay=ROUND_TRIP / 2, rate=RATE, queue=RATE / 8 * queue / 1000)
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(Lab(link, seed=seed))
        if other in RULES:
            stack.enter_context(exchanging(lab, other))
        flows = [Tcp(lab, control) for _ in range(2 if other == ANOTHER else 1)]
        try:
            time.sleep(_WARM * seconds)
            before, began = flows[0].received, time.monotonic()
            time.sleep((1 - _WARM) * seconds)
            return 8 * (flows[0].received - before) / (time.monotonic() - began)
        finally:
            for flow in flows:
                flow.close()


Kept = dict[tuple[str, str, float], list[float]]


def measure(
    controls: Sequence[str], others: Sequence[str], queues: Sequence[float], seconds: float, seeds: int
) -> Kept:
    """Return the shares (percent) of its rate alone that a flow keeps, by control, other and queue; one a seed."""
    kept: Kept = {}
    for seed in range(1, seeds + 1):
        for control in controls:
            for queue in queues:
                alone = carried(control, queue, None, seconds, seed)
                for other in others:
                    share = 100 * carried(control, queue, other, seconds, seed) / alone
                    kept.setdefault((control, other, queue), []).append(share)
                    print(
                        f"seed {seed}, {CONTROLS[control]}, queue {queue:g} ms, next to {other}: {share:.0f} %",
                        flush=True,
                    )
    return kept


def markdown(kept: Kept, header: Sequence[str]) -> str:
    """Return the result."""
    queues = sorted({queue for *_, queue in kept})
    lines = ["# What TCP keeps next to exchanges over UDP", "", *[f"- {line}" for line in header], ""]
    link = f"{RATE / 1e6:.0f} Mbit/s with a round trip of {1000 * ROUND_TRIP:.0f} ms"
    lines += [
        f"Percent of its rate alone that a TCP flow of the kernel keeps over {link}: median, least and most of the runs.",
        "",
        "| TCP | next to | " + " | ".join(f"queue {queue:g} ms" for queue in queues) + " |",
        "| --- " * (2 + len(queues)) + "|",
    ]
    for control, other in dict.fromkeys((control, other) for control, other, _ in kept):
        cells = []
        for queue in queues:
            values = kept[control, other, queue]
            spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
            cells.append(f"{statistics.median(values):.0f}{spread}")
        lines.append(f"| {CONTROLS[control]} | {other} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def plot(kept: Kept, path: Path) -> None:
    """Draw it: a panel for each kind of TCP."""
    controls = list(dict.fromkeys(control for control, *_ in kept))
    figure = Figure(figsize=(4.2 * len(controls), 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, control in zip(figure.subplots(1, len(controls), sharey=True, squeeze=False)[0], controls):
        for other in dict.fromkeys(other for _, other, _ in kept):
            queues = [queue for tcp, beside, queue in kept if (tcp, beside) == (control, other)]
            values = [statistics.median(kept[control, other, queue]) for queue in queues]
            axes.plot(queues, values, "--" if other == ANOTHER else "-", marker="o", markersize=4, label=other)
        axes.set_xscale("log")
        axes.set_xticks(queues, [f"{queue:g}" for queue in queues])
        axes.minorticks_off()
        axes.set_ylim(0, 105)
        axes.set_xlabel("queue of the link (ms)")
        axes.set_title(f"One {CONTROLS[control]} flow next to", loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("share of its rate alone (%)")
    figure.axes[-1].legend(frameon=False, loc="lower left", fontsize=9)
    figure.savefig(path, dpi=150)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.beside_tcp", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=12.0, metavar="S", help="of each run (default 12)")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="runs of each (default 3)")
    parser.add_argument("--rules", nargs="+", default=["shared", "dedicated"], choices=RULES, help="of --udp-rate")
    parser.add_argument("--queues", type=float, nargs="+", default=QUEUES, metavar="MS", help="of the link")
    parser.add_argument("--out", default=RESULTS, metavar="FOLDER", help=f"default {RESULTS}")
    parser.add_argument("--replace", action="store_true", help="write over results of the same day")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors("benchmarks.beside_tcp"):
        if not args.seconds > 0:
            raise refuse("--seconds", args.seconds, "must be above 0")
        if args.seeds < 1:
            raise refuse("--seeds", args.seeds, "must be at least 1")
        if not min(args.queues) > 0:
            raise refuse("--queues", min(args.queues), "must be milliseconds above 0")
        result = Path(args.out) / f"beside_tcp_{today()}.md"
        if result.exists() and not args.replace:
            raise refuse("--out", args.out, f"{result.name} is there already; --replace writes over it")
        try:
            with Lab(None) as lab:
                there = lab.nodes[0].sysctl("net.ipv4.tcp_available_congestion_control").split()
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
            return 0
        controls = [control for control in CONTROLS if control in there]
        kept = measure(controls, [ANOTHER, *args.rules], args.queues, args.seconds, args.seeds)
    write_results(result.parent, result.stem, md=markdown(kept, made_with("benchmarks.beside_tcp", argv)))
    plot(kept, result.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
