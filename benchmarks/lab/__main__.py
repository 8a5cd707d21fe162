"""Run a command on every machine of a lab.

    GLOO_SOCKET_IFNAME=lab0 python -m benchmarks.lab --rtt 20 --loss 0.01 -- env RANK={node} WORLD_SIZE={nodes} \\
        LOCAL_RANK=0 MASTER_ADDR={first} MASTER_PORT=29500 python -m megatron_lossy.train …

In the command {node} stands for the number of the machine, {nodes} for how many there are, {address} for the IP address
of this one and {first} for that of the first. They are joined by the interface lab0. Ends when all have ended, or
when one has failed, and with its status. Then it prints the counters of the links.
"""

from __future__ import annotations

import argparse
import math
import os
import sys

from megatron_lossy.base.errors import refuse, usage_errors

from . import Lab, Link, MissingRequirement, end_in_order, wait


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="there and back (default 20)")
    parser.add_argument("--loss", type=float, default=0.0, metavar="P", help="share of packets lost, such as 0.01")
    parser.add_argument("--burst", type=float, metavar="PACKETS", help="lost in a row on average; default: independent")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s in each direction; default: no limit")
    parser.add_argument("--queue", type=float, metavar="MS", help="longest wait for a link with --rate")
    parser.add_argument("--reorder", type=float, default=0.0, metavar="P", help="share of packets that come 5 ms late")
    parser.add_argument("--duplicate", type=float, default=0.0, metavar="P", help="share of packets that come twice")
    parser.add_argument("--mtu", type=int, default=1500, metavar="BYTES", help="of the links (default 1500)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument(
        "--sites", type=int, nargs="+", default=[1, 1], metavar="NODES", help="machines in each site (default 1 1)"
    )
    parser.add_argument("command", nargs="+", help="what to run, after --")
    return parser


def link_of(args: argparse.Namespace) -> Link:
    """Return the link that the flags describe. Raise :class:`UsageError`."""
    rate = None if args.rate is None else 1e6 * args.rate
    if args.queue is not None and rate is None:
        raise refuse("--queue", args.queue, "needs --rate")
    queue = math.inf if args.queue is None else args.queue / 1000 * rate / 8
    return Link(args.rtt / 2000, args.loss, args.burst, rate, queue, args.reorder, duplicate=args.duplicate)


def run(args: argparse.Namespace) -> int:
    """Run the command everywhere; returns the exit status."""
    with Lab(link_of(args), args.sites, args.mtu, args.seed) as lab:
        started = []
        for node in lab.nodes:
            words = {"node": node.number, "nodes": len(lab.nodes), "address": node.address, "first": lab.address(0)}
            command = list(args.command)
            for word, value in words.items():
                command = [part.replace(f"{{{word}}}", str(value)) for part in command]
            started.append(lab.start(node.number, command))
        status = wait(started)
        for source in range(len(args.sites)):
            for destination in range(len(args.sites)):
                if source != destination:
                    link = lab.counters(source, destination)
                    share = link.lost / max(link.packets, 1)
                    print(
                        f"link from site {source} to site {destination}: {link.packets} packets, {link.bytes} bytes, "
                        f"{link.lost} lost ({share:.2%}), {link.overflowed} did not fit the queue",
                        file=sys.stderr,
                    )
        if dropped := lab.dropped():
            print(f"this machine was too slow for the links: it dropped {dropped} packets itself", file=sys.stderr)
        return status


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    with usage_errors("benchmarks.lab"):
        try:
            return run(parser().parse_args(argv))
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
            return 0


if __name__ == "__main__":
    end_in_order()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
