"""An FSDP2 model on two machines with a lossy link between them: plain over gloo and TCP, and ours over UDP.

    python -m benchmarks.fsdp_wan [--rtt 20] [--loss 0.01] [--rate MBIT] [--steps 20] [--hidden 256] [--out benchmarks/results]

As root, on Linux (benchmarks/lab). Two ranks in two network namespaces train the model of ``benchmarks.fsdp_step``, resharded
after the forward pass, in turns: with plain FSDP2 over TCP BBR, with one gather for each update over the same, and with
datagrams that nobody sends again. The medians over steps, without the first three, are those of the first rank.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import RESULTS, free_port, made_with, today, write_results
from benchmarks.lab import INTERFACE, Lab, Link, Missing, end_in_order, wait
from megatron_lossy.base.device.environment import without_ranks
from megatron_lossy.base.errors import refuse, usage_errors

#: What is trained: loss flags; ``None`` is plain FSDP2.
RUNS: dict[str, dict[str, Any] | None] = {
    "FSDP2 over gloo, BBR": None,
    "one gather an update, gloo, BBR": {},
    "one gather an update, UDP": {"transport": "udp", "udp_interface": INTERFACE},
}
_SKIPPED = 3


def rank(name: str, steps: int, hidden: int, out: str) -> None:
    """One rank of one run: train, and write the seconds of each step."""
    import torch
    import torch.distributed as dist

    from benchmarks.fsdp_step import Settings, Trainer
    from megatron_lossy.base import device

    torch.set_num_threads(1)
    device.init_process_group("gloo")
    flags = RUNS[name]
    settings = Settings(hidden=hidden, layers=4, p=0.0)
    trainer = Trainer(settings, None if flags is None else (flags, {}))
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        trainer.step()
        seconds.append(time.perf_counter() - start)
    measured = {} if trainer.lossy is None else trainer.lossy.metrics()
    if trainer.lossy is not None:
        trainer.lossy.close()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    if dist.get_rank() == 0:
        told = {"seconds": seconds, "sent": trainer.sent_bytes / steps, "parameters": parameters, "measured": measured}
        Path(out).write_text(json.dumps(told))
    dist.barrier()
    dist.destroy_process_group()


def train(lab: Lab, name: str, args: argparse.Namespace) -> dict[str, Any]:
    """A run on both machines of ``lab``; the result of its first rank."""
    common = without_ranks() | {
        "MASTER_ADDR": lab.address(0),
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "told.json"), Path(folder, "log.txt")
        command = [sys.executable, "-m", "benchmarks.fsdp_wan", "--rank", name, "--result", str(out)]
        command += ["--steps", str(args.steps), "--hidden", str(args.hidden)]
        with open(log, "w") as file:
            started = [
                lab.start(number, command, env=common | {"RANK": str(number)}, stdout=file, stderr=subprocess.STDOUT)
                for number in range(2)
            ]
            status = wait(started)
        if status:
            raise RuntimeError(f"{name}: status {status}\n" + "\n".join(log.read_text().splitlines()[-15:]))
        return json.loads(out.read_text())


def table(args: argparse.Namespace, results: dict[str, dict[str, Any]], argv: list[str]) -> str:
    """The result as Markdown."""
    medians = {name: statistics.median(one["seconds"][_SKIPPED:]) for name, one in results.items()}
    first = next(iter(medians.values()))
    rate = "no limit of rate" if args.rate is None else f"{args.rate:g} Mbit/s"
    parameters = next(iter(results.values()))["parameters"]
    what = (
        f"A link of {args.rtt:g} ms and {args.loss:.0%} loss, {rate}; two ranks, {parameters / 1e6:.1f} M parameters, "
        f"{args.steps} steps."
    )
    lines = [
        "# FSDP2 over a lossy link",
        "",
        what,
        "",
        *(f"- {line}" for line in made_with("benchmarks.fsdp_wan", argv)),
        "",
        "| run | ms per step, median | times as fast | bytes sent per step and rank | gradients lost | parameters lost |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, one in results.items():
        lost = [one["measured"].get(f"loss rate {phase}") for phase in ("grad", "param")]
        cells = ["" if share is None else f"{share:.2%}" for share in lost]
        lines.append(
            f"| {name} | {1000 * medians[name]:.0f} | {first / medians[name]:.1f} | {one['sent']:,.0f} | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run everything; or one rank, which the program starts itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS")
    parser.add_argument("--loss", type=float, default=0.01, metavar="P")
    parser.add_argument("--rate", type=float, metavar="MBIT")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--out", default=RESULTS)
    parser.add_argument("--rank", help=argparse.SUPPRESS)
    parser.add_argument("--result", help=argparse.SUPPRESS)
    args = parser.parse_args()
    with usage_errors("fsdp_wan"):
        if args.steps <= _SKIPPED:
            raise refuse("--steps", args.steps, f"must be above {_SKIPPED}")
        if args.rank is not None:
            rank(args.rank, args.steps, args.hidden, args.result)
            return 0
        rate = None if args.rate is None else 1e6 * args.rate
        results = {}
        try:
            with Lab(Link(args.rtt / 2000, args.loss, None, rate)) as lab:
                if "bbr" in lab.nodes[0].sysctl("net.ipv4.tcp_available_congestion_control").split():
                    lab.sysctl("net.ipv4.tcp_congestion_control", "bbr")
                else:
                    print("no bbr here (modprobe tcp_bbr): gloo runs over the default")
                for name in RUNS:
                    results[name] = train(lab, name, args)
                    print(f"{name}: {1000 * statistics.median(results[name]['seconds'][_SKIPPED:]):.0f} ms", flush=True)
        except Missing as missing:
            print(f"fsdp_wan: {missing}")
            return 1
    text = table(args, results, sys.argv[1:])
    print("\n" + text)
    write_results(args.out, f"fsdp_wan_{today()}", md=text)
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
