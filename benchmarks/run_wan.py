"""Train a tiny model over a lossy wide-area link: over gloo and TCP, over UDP without retransmission, or as islands.

    python -m benchmarks.run_wan [--loss 0.01] [--rtt 20] [--out runs/wan]      (make run-wan)
    python -m benchmarks.run_wan --rate 100 --rtt 50 --runs "gloo bbr" alone islands "islands udp"
    python -m benchmarks.run_wan --rate 100 --rtt 50 --runs udp "udp int8" "udp int4"
    python -m benchmarks.run_wan --rate 100 --ranks 2 --runs instances "sites stream" "sites udp" "sites udp int8"

As root, on Linux (benchmarks/lab); elsewhere it says what is missing. Two ranks, or as many in each site as --ranks says,
train the model of configs/tiny with each transport, one after the other, each rank in a network namespace of its own. It prints the time of an iteration, the part of it
that is communication, and when each run reached a validation loss that all of them reach. Gloo over TCP Reno trains a
few iterations only: it computes what gloo over BBR does, bit for bit, and is too slow for more. Islands average 25 % of
their parameters, an iteration late: as much and as soon as such a link lets them. Alone, they exchange nothing. With
int8 gradients and parameters, or what islands average, cross in 8 bits; with int4 gradients in 4. Instances are
Megatron's own optimizer instances, one for each site, over gloo and BBR; sites are --sites.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.common import free_port, made_with
from benchmarks.lab import INTERFACE, Lab, Link, MissingRequirement, end_in_order, wait
from megatron_lossy.base.errors import refuse, usage_errors
from megatron_lossy.base.files import replace_file, write_text
from megatron_lossy.lab.train.metrics import METRICS_FILE

_UDP = ("--transport", "udp", "--loss-unit", "packet", "--udp-interface", INTERFACE)
_STREAM = ("--transport", "stream", "--loss-unit", "packet", "--udp-interface", INTERFACE)
_CODES = ("--grad-wire", "int8", "--param-wire", "int8")
_SITES = ("--sites", "2")
_ISLANDS = ("--islands", "2", "--sync-method")
_AVERAGED = (*_ISLANDS, "parameters", "--sync-fraction", "0.25", "--sync-delay", "1")
#: Contestants: TCP's congestion control, and flags.
RUNS = {
    "gloo bbr": ("bbr", ()),
    "gloo reno": ("reno", ()),
    "tcp bbr": ("bbr", (*_STREAM, "--udp-deadline", "off")),  # one connection for each pair, waited for whole
    "stream": ("bbr", _STREAM),
    "udp": ("bbr", _UDP),
    "udp int8": ("bbr", (*_UDP, *_CODES)),
    "udp int4": ("bbr", (*_UDP, "--grad-wire", "int4", "--param-wire", "int8")),
    "instances": ("bbr", ("--num-distributed-optimizer-instances", "2")),
    "sites stream": ("bbr", (*_STREAM, *_SITES)),
    "sites udp": ("bbr", (*_UDP, *_SITES)),
    "sites udp int8": ("bbr", (*_UDP, *_SITES, *_CODES)),
    "alone": ("bbr", (*_ISLANDS, "none")),
    "islands": ("bbr", _AVERAGED),
    "islands udp": ("bbr", (*_AVERAGED, *_UDP)),
    "islands udp int8": ("bbr", (*_AVERAGED, *_UDP, "--sync-dtype", "int8")),
}
_DEFAULT = ("gloo bbr", "gloo reno", "udp")
#: Measurements of a rank (benchmarks.wan_rank).
KINDS = ("grad", "param", "other")
#: Kinds of exchanges and their names in the table; "sync" is waiting for an average of islands, by their metrics.
EXCHANGES = ("grad", "param", "sync")
#: The first iterations warm up.
SKIPPED = 2
_EXPLANATION = (
    "Medians over iterations. Exchanges: the reduce-scatter of the gradients and the all-gather of the parameters, "
    "from when the last rank comes to them; of islands also what an iteration waits for an average. Other "
    "communication: what else an iteration waits for, such as the norm of the gradients; it goes over TCP in every run. The time to the same loss is the number of iterations, times "
    "that of an iteration."
)
_COLOURS = dict(zip(RUNS, colormaps["tab10"].colors + colormaps["Dark2"].colors, strict=False))


def metrics_file(folder: Path) -> Path:
    """Return the metrics of the run in ``folder``: of islands each writes its own."""
    island = folder / "island_0"
    return (island if island.exists() else folder) / METRICS_FILE


@dataclass
class Run:
    """Results of one training. ``seconds`` of an iteration by iteration, ``communication`` [kind][iteration].

    An exchange lasts until the last rank has it, and begins when the last one comes to it: that one's time counts,
    which is the shortest.
    """

    name: str
    iterations: int
    seconds: dict[int, float]
    train: dict[int, float]
    valid: dict[int, float]
    communication: dict[str, np.ndarray]

    @classmethod
    def read(cls, name: str, folder: Path, ranks: int) -> Run:
        records = [json.loads(line) for line in metrics_file(folder).read_text().splitlines()]
        train = {record["iteration"]: record for record in records if record["kind"] == "train"}
        valid = {record["iteration"]: record["lm loss"] for record in records if record["kind"] == "valid"}
        times = [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]
        communication = {kind: np.min([own[kind] for own in times], axis=0) for kind in KINDS}
        communication["sync"] = np.array([train[iteration].get("sync wait", 0.0) for iteration in sorted(train)])
        seconds = {iteration: record["seconds"] for iteration, record in train.items()}
        losses = {iteration: record["lm loss"] for iteration, record in train.items()}
        return cls(name, max(train), seconds, losses, valid, communication)

    @property
    def iteration_ms(self) -> float:
        """Median milliseconds of an iteration, evaluation left out."""
        return 1e3 * float(np.median([seconds for iteration, seconds in self.seconds.items() if iteration > SKIPPED]))

    def communication_ms(self, *kinds: str) -> float:
        """Return median milliseconds of these kinds of communication in an iteration."""
        return 1e3 * float(np.median(np.sum([self.communication[kind] for kind in kinds], axis=0)[SKIPPED:]))

    def iterations_to(self, loss: float) -> float | None:
        """Return the iteration at which the validation loss was ``loss``, interpolated between two evaluations."""
        points = sorted(self.valid.items())
        for (before, higher), (after, lower) in itertools.pairwise(points):
            if higher >= loss >= lower:
                return after - (after - before) * (loss - lower) / max(higher - lower, 1e-12)
        return float(points[0][0]) if points and points[0][1] <= loss else None


def _folder(args: argparse.Namespace, name: str) -> Path:
    return Path(args.out) / name.replace(" ", "_")


def train(lab: Lab, name: str, iterations: int, args: argparse.Namespace) -> Run:
    """Train once over the link of ``lab``."""
    folder = _folder(args, name)
    if folder.exists():  # of --replace
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    control, kind = RUNS[name]
    transport = [*kind, *(shlex.split(args.flags) if "udp" in kind else ())]
    if (
        args.dedicated and "udp" in kind and "--islands" not in kind
    ):  # a rate is that of a site or, without sites, of a rank
        share = args.rate if "--sites" in kind else args.rate / args.ranks
        transport += ["--udp-rate", "dedicated", f"{share:g}mbit"]
    if control in _controls(lab):
        lab.sysctl("net.ipv4.tcp_congestion_control", control)
    flags = ["--config", args.config, "--train-iters", str(iterations), "--log-interval", "1"]
    flags += ["--eval-interval", str(args.eval_interval), "--lr-decay-iters", str(args.iterations)]
    flags += ["--lr-warmup-iters", str(args.iterations // 10), *shlex.split(args.train_flags)]
    if iterations < args.iterations:
        flags += ["--eval-iters", "0"]
    started, port = [], free_port()
    with open(folder / "log.txt", "w") as log:
        for rank in range(len(lab.nodes)):
            command = [sys.executable, "-m", "benchmarks.wan_rank", str(folder / f"rank_{rank}.json"), *flags]
            command += ["--metrics-dir", str(folder), *transport]
            started.append(
                lab.start(rank, command, env=lab.environment(rank, port), stdout=log, stderr=subprocess.STDOUT)
            )
        status = wait(started)
    if status:
        tail = "\n".join((folder / "log.txt").read_text().splitlines()[-15:])
        raise RuntimeError(f"{name}: status {status}; the end of {folder / 'log.txt'}:\n{tail}")
    return Run.read(name, folder, len(lab.nodes))


def table(runs: Sequence[Run], target: float | None, header: Sequence[str]) -> tuple[list[list[str]], str]:
    """Return rows of cells, the first of them the head, and the same as Markdown under ``header``."""
    rows = [
        ["", "ms per iteration", "exchanges (ms)", "other communication (ms)", "validation loss", "to the same loss"]
    ]
    steps = {run.name: run.iterations_to(target) for run in runs if run.valid and target is not None}
    for run in runs:
        # Gloo's losses do not depend on the congestion control.
        step = steps.get(run.name, steps.get("gloo bbr") if run.name == "gloo reno" else None)
        last = f"{run.valid[max(run.valid)]:.3f}" if run.valid else "as with bbr"
        reached = "" if step is None else f"{step * run.iteration_ms / 1e3:.1f} s ({step:.0f} iterations)"
        exchanges, other = run.communication_ms(*EXCHANGES), run.communication_ms("other")
        rows.append([run.name, f"{run.iteration_ms:.0f}", f"{exchanges:.0f}", f"{other:.0f}", last, reached])
    head, *body = rows
    lines = ["# Training over a wide-area link", "", *(f"- {line}" for line in header), ""]
    lines += [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *body)]
    lines += ["", f"The same loss: {target:.3f}, which every whole run reaches." if target is not None else "", ""]
    lines += [_EXPLANATION, ""]
    return rows, "\n".join(lines)


def picture(runs: Sequence[Run], target: float | None, path: Path) -> None:
    """Validation and training loss over time, and what an iteration is made of."""
    figure = Figure(figsize=(13, 5.2), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, width_ratios=(2, 1))
    for run in runs:
        colour, iterations = _COLOURS[run.name], np.array(sorted(run.train))
        time = np.cumsum([run.seconds[iteration] for iteration in iterations])
        left.plot(time, [run.train[iteration] for iteration in iterations], color=colour, alpha=0.3, linewidth=1)
        label = run.name if run.valid else f"{run.name} ({run.iterations} iterations)"
        valid = sorted(run.valid)
        places = [time[np.searchsorted(iterations, iteration)] for iteration in valid]
        left.plot(places, [run.valid[iteration] for iteration in valid], "-o", color=colour, markersize=5, label=label)
    if target is not None:
        left.axhline(target, color="grey", linestyle=":", linewidth=1.2, label=f"loss {target:.3f}")
    left.set_xlabel("seconds of training, evaluation left out")
    left.set_ylabel("language-model loss (nats per token)")
    left.set_title("Faint: training; with marks: validation", fontsize=11)
    left.grid(True, alpha=0.35)
    left.legend()
    names = [run.name for run in runs]
    bottom = np.zeros(len(runs))
    parts = {
        "exchanges": [run.communication_ms(*EXCHANGES) for run in runs],
        "other communication": [run.communication_ms("other") for run in runs],
    }
    parts["the rest"] = [run.iteration_ms - sum(values[i] for values in parts.values()) for i, run in enumerate(runs)]
    for (label, values), colour in zip(parts.items(), ("#d95f02", "#fdb462", "#bdbdbd")):
        right.bar(names, np.maximum(values, 0), bottom=bottom, label=label, color=colour)
        bottom += np.maximum(values, 0)
    right.set_ylabel("milliseconds of an iteration, median")
    # Reno is an order of magnitude slower; its bar is cut, lest the others cannot be seen.
    top = 1.25 * max([run.iteration_ms for run in runs if run.name != "gloo reno"] or [bottom.max()])
    for place, run in enumerate(runs):
        text = f"{run.iteration_ms:.0f}" + (" ↑" if bottom[place] > top else "")
        right.annotate(text, (place, min(bottom[place], top)), ha="center", va="bottom", fontsize=10)
    right.set_ylim(0, top)
    right.tick_params(axis="x", labelrotation=20)
    right.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=9)
    figure.savefig(path, format="png")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run_wan", description=__doc__.splitlines()[0])
    parser.add_argument("--loss", type=float, default=0.01, metavar="P", help="share of packets lost (default 0.01)")
    parser.add_argument("--rtt", type=float, default=20.0, metavar="MS", help="round-trip time (default 20)")
    parser.add_argument("--rate", type=float, metavar="MBIT", help="of the link, Mbit/s (default: no limit)")
    parser.add_argument("--queue", type=float, metavar="MS", help="longest wait for the link (default: a round trip)")
    parser.add_argument(
        "--dedicated", action="store_true", help="send datagrams at the rate of the link, but for those of islands"
    )
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="of each of the two sites (default 1)")
    parser.add_argument(
        "--runs", nargs="+", choices=RUNS, default=_DEFAULT, metavar="NAME", help=f"of {', '.join(RUNS)}"
    )
    parser.add_argument("--config", default="configs/tiny/llama_1m.yaml", metavar="FILE", help="what is trained")
    parser.add_argument("--iterations", type=int, default=200, metavar="N", help="to train (default 200)")
    parser.add_argument("--reno-iterations", type=int, default=5, metavar="N", help="over Reno (default 5; 0: none)")
    parser.add_argument("--eval-interval", type=int, default=20, metavar="N", help="default 20")
    parser.add_argument(
        "--train-flags", default="", help="more flags of every run, as one word: '--global-batch-size 8'"
    )
    parser.add_argument(
        "--flags", default="", help="more flags of the run over UDP, as one word: '--udp-key-file none'"
    )
    parser.add_argument("--out", default="runs/wan", metavar="FOLDER", help="for runs and results (default runs/wan)")
    parser.add_argument("--replace", action="store_true", help="write over the results that are there")
    return parser


def _controls(lab: Lab) -> list[str]:
    return lab.nodes[0].sysctl("net.ipv4.tcp_available_congestion_control").split()


def _queue(args: argparse.Namespace) -> float:
    return args.rtt if args.queue is None else args.queue


def link(args: argparse.Namespace) -> Link:
    """Return the link of these flags."""
    if args.rate is None:
        for flag, given in (("--queue", args.queue), ("--dedicated", args.dedicated or None)):
            if given is not None:
                raise refuse(flag, given, "needs --rate")
        return Link(args.rtt / 2000, args.loss)
    if not args.rate > 0:
        raise refuse("--rate", args.rate, "must be above 0")
    rate = args.rate * 1e6
    return Link(args.rtt / 2000, args.loss, rate=rate, queue=rate / 8 * _queue(args) / 1000)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """All trainings, their table and their picture."""
    plan = {name: args.reno_iterations if name == "gloo reno" else args.iterations for name in args.runs}
    notes, runs = [], []
    with Lab(link(args), (args.ranks, args.ranks)) as lab:
        there = _controls(lab)
        for name, iterations in plan.items():
            control = RUNS[name][0]
            if name.startswith("gloo") and control not in there:
                notes.append(f"{name} left out: no {control} here (modprobe tcp_{control})")
            elif iterations:
                print(f"{name}: {iterations} iterations …", flush=True)
                runs.append(train(lab, name, iterations, args))
                print(f"{name}: {runs[-1].iteration_ms:.0f} ms per iteration", flush=True)
        if lab.dropped():
            notes.append(f"this machine dropped {lab.dropped()} packets itself")
    target = max((min(run.valid.values()) for run in runs if run.valid), default=None)
    date, command, *machine = made_with("benchmarks.run_wan", argv)
    rate = "no limit of rate" if args.rate is None else f"{args.rate:g} Mbit/s, queue {_queue(args):g} ms"
    what = f"Link: {100 * args.loss:g} % of packets lost, {args.rtt:g} ms round trip, {rate}; {2 * args.ranks} ranks"
    header = [date, command, what, *machine, *notes]
    _, text = table(runs, target, header)
    print("\n" + text)
    out = Path(args.out)
    write_text(out / "wan.md", text)
    replace_file(out / "wan.png", lambda aside: picture(runs, target, aside))
    print(f"wrote {out / 'wan.md'}, .png")


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors("benchmarks.run_wan"):
        there = next((name for name in RUNS if _folder(args, name).exists()), None)
        if there and not args.replace:
            raise refuse("--out", args.out, f"{_folder(args, there).name} is there already; --replace removes it")
        try:
            run(args, argv)
        except MissingRequirement as missing:
            print(f"skipped: {missing}")
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
