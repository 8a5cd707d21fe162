"""Train a tiny model on islands that are launches of their own, while these are killed, frozen, cut off, and added.

    python -m benchmarks.churn [--schedule FILE] [--out runs/churn]      (make run-churn)

It starts a lighthouse and islands as processes, and makes happen what the schedule says: lines as those of
--island-schedule, {"slot": 1, "at": 120, "event": "stop"}. stop is kill -9, freeze is SIGSTOP, cut takes the network away (as root, on
Linux: benchmarks/lab; elsewhere cuts are left out), and return undoes it; what was killed goes on from its checkpoint. The
lighthouse is killed, and started again, as --lighthouse-away says. Then it prints what each event cost the others, and the
losses, and draws both.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.churn.islands import Islands
from benchmarks.churn.networks import Loopback, Network, lab_of
from benchmarks.churn.picture import picture
from benchmarks.churn.results import Island, Results, markdown
from benchmarks.churn.schedule import DEFAULT, DEFAULT_AWAY, Director, first_islands, without_cuts
from benchmarks.common import made_with
from benchmarks.lab import Missing, check_lab, end_in_order
from megatron_lossy.errors import refuse, usage_errors
from megatron_lossy.files import replace_file, write_text
from megatron_lossy.mechanisms.islands.schedule import Schedule, read_schedule
from megatron_lossy.rendezvous.lighthouse import torchft

_PROGRAM = "benchmarks.churn"
#: Of every island, beside its number.
_FLAGS = {
    "--sync-method": "parameters",
    "--sync-fraction": 0.25,
    "--sync-interval": 2,
    "--sync-delay": 4,
    "--island-patience": 5,
    "--island-keep": 40,
    "--island-poll": 0.3,
    "--island-join": 20,
    "--log-interval": 1,
    "--save-interval": 50,
    "--eval-interval": 100,
    "--eval-iters": 4,
}
_EXPLANATION = (
    "Updates possible: iterations of the run while the process was there, had entered the run, and was not frozen. An exchange is lost "
    "whole if nothing of it arrived at that island. Who dies or freezes is waited for once, {patience} s at most; a death is noticed "
    "at once by whoever waits for it."
)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {_PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedule", metavar="FILE", help="what happens (default: a death, a freeze, a cut, a new island)"
    )
    parser.add_argument(
        "--lighthouse-away",
        type=int,
        nargs=2,
        metavar=("FROM", "TO"),
        help="iterations of the run between which there is no lighthouse (default, without --schedule: 770 900)",
    )
    parser.add_argument("--islands", type=int, default=4, metavar="S", help="slots (default 4)")
    parser.add_argument("--config", default="configs/tiny/llama_1m.yaml", metavar="FILE", help="what is trained")
    parser.add_argument("--iterations", type=int, default=1200, metavar="N", help="to train (default 1200)")
    parser.add_argument("--flags", default="", help="more flags of every island, as one word: '--transport udp'")
    parser.add_argument(
        "--out", default="runs/churn", metavar="FOLDER", help="for runs and results (default runs/churn)"
    )
    parser.add_argument("--replace", action="store_true", help="write over the results that are there")
    return parser


def schedule_of(args: argparse.Namespace) -> Schedule:
    """What happens. Raises :class:`UsageError`."""
    if args.schedule is not None:
        return read_schedule(args.schedule, args.islands, args.iterations)
    for name, least in (("islands", 4), ("iterations", DEFAULT.events[-1].at + 1)):
        if getattr(args, name) < least:
            raise refuse(f"--{name}", getattr(args, name), f"must be at least {least} without --schedule")
    return DEFAULT


@contextlib.contextmanager
def _network(machines: int) -> Iterator[tuple[Network, list[str]]]:
    """A network, and what it lacks."""
    try:
        check_lab()
    except Missing as missing:
        yield Loopback(), [f"nobody is cut off: {missing}"]
        return
    with lab_of(machines) as lab:
        yield lab, []


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """The run, its tables and its picture."""
    schedule, out = schedule_of(args), Path(args.out)
    away = args.lighthouse_away or (DEFAULT_AWAY if args.schedule is None else None)
    flags = ["--config", args.config, "--islands", str(args.islands), "--train-iters", str(args.iterations)]
    flags += [str(word) for pair in _FLAGS.items() for word in pair] + args.flags.split()
    flags += [
        "--save",
        str(out / "saved"),
        "--load",
        str(out / "saved"),
        "--save-replicas",
        "--delivery-log",
        str(out / "log"),
    ]
    with _network(args.islands + 1) as (network, notes):
        schedule = schedule if network.can_cut else without_cuts(schedule)
        islands = Islands(network, out, flags)
        try:
            began = time.monotonic()
            director = Director(islands, schedule, away and tuple(away), lambda line: print(line, flush=True))
            islands.serve()
            for slot in first_islands(schedule, args.islands):
                islands.start(slot)
            while not director.over:
                islands.read()
                director.direct()
                _check(islands, args.iterations)
                time.sleep(0.05)
            islands.read()
            notes.append(f"It took {time.monotonic() - began:.0f} s")
        finally:
            islands.end()
    _check(islands, args.iterations)
    failed = [one for one in islands.lives if one.process.returncode not in (0, -signal.SIGKILL)]
    notes += [f"island {one.slot} ended with status {one.process.returncode}" for one in failed]
    slots = sorted({one.slot for one in islands.lives})
    found = [Island.read(slot, islands.lives, out / "log") for slot in slots]
    _write(args, argv, Results(found, director.happened, args.iterations), notes)


def _check(islands: Islands, end: int) -> None:
    """Raise :class:`RuntimeError` if an island has ended by itself before iteration ``end``."""
    for life in islands.lives:
        if life.process.poll() not in (None, 0, -signal.SIGKILL) and life.iteration < end:
            raise RuntimeError(
                f"island {life.slot}: status {life.process.returncode}; the end of {life.log}:\n{life.tail()}"
            )


def _write(args: argparse.Namespace, argv: Sequence[str], results: Results, notes: Sequence[str]) -> None:
    out = Path(args.out)
    date, command, *machine = made_with(_PROGRAM, argv)
    what = f"{args.islands} slots, {args.iterations} iterations of {args.config}, {results.usual():.2f} s each (median)"
    goodput = f"Updates made of those possible: {100 * results.goodput:.1f} %."
    lines = ["# Training with islands that come and go", ""]
    lines += [f"- {line}" for line in (date, command, what, *machine, *notes)]
    lines += ["", *markdown(results.events()), "", *markdown(results.table()), "", goodput, ""]
    lines += [_EXPLANATION.format(patience=_FLAGS["--island-patience"]), ""]
    text = "\n".join(lines)
    print("\n" + text)
    write_text(out / "churn.md", text)
    title = (
        f"{len(results.islands)} islands that come and go: {100 * results.goodput:.1f} % of the possible updates made"
    )
    replace_file(out / "churn.png", lambda aside: picture(results, title, aside))
    print(f"wrote {out / 'churn.md'}, .png")


def main(argv: list[str] | None = None) -> int:
    """The program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors(_PROGRAM):
        torchft()
        schedule_of(args)
        out = Path(args.out)
        if out.exists():
            if not args.replace:
                raise refuse("--out", args.out, "is there already; --replace removes it")
            shutil.rmtree(out)
        out.mkdir(parents=True)
        run(args, argv)
    return 0


if __name__ == "__main__":
    end_in_order()
    sys.exit(main())
