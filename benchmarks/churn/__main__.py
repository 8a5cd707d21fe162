"""Train a tiny model on islands that are launches of their own, while these are killed, frozen, cut off, and added.

    python -m benchmarks.churn [--schedule FILE | --kill-every SECONDS [--kills N]] [--undisturbed] [--out runs/churn]      (make run-churn)

It starts a coordinator and islands as processes, and makes happen what the schedule says: lines as those of
--island-schedule, {"slot": 1, "at": 120, "event": "stop"}. stop is kill -9, freeze is SIGSTOP, cut takes the network away (as root, on
Linux: benchmarks/lab; elsewhere cuts are left out), and return undoes it; what was killed goes on from its checkpoint. The
coordinator is killed, and started again, as --coordinator-away says. Then it prints the cost of each event for the
others, and the losses, and draws both. --undisturbed trains the same islands once more, without events.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from benchmarks.churn.islands import Islands
from benchmarks.churn.networks import Loopback, Network, lab_of
from benchmarks.churn.picture import picture
from benchmarks.churn.results import Island, Results, compared, markdown
from benchmarks.churn.schedule import DEFAULT, DEFAULT_AWAY, Director, Events, Kills, first_islands, without_cuts
from benchmarks.common import made_with
from benchmarks.lab import Link, MissingRequirement, check_lab, end_in_order
from megatron_lossy.base.errors import STOPPED, UsageError, refuse, usage_errors
from megatron_lossy.base.files import replace_file, write_text
from megatron_lossy.lab.virtual.island_schedule import Schedule, read_schedule

_PROGRAM = "benchmarks.churn"
#: Flags of every island, besides its number. Those of --flags come later and win.
_FLAGS = {
    "--sync-method": "parameters",
    "--sync-fraction": 0.25,
    "--sync-interval": 2,
    "--sync-delay": 4,
    "--island-patience": 5,
    "--island-keep": 40,
    "--island-join": 20,
    "--log-interval": 1,
    "--save-interval": 50,
    "--eval-interval": 100,
    "--eval-iters": 4,
}
#: The round trip between two islands, in ms, if nothing else is asked for.
_RTT = 2.0
#: The share of a run after which no island is killed any more: all are there at its end.
_KILLS_UNTIL = 0.97
_EXPLANATION = (
    "Updates possible: iterations of the run while the process was there, had entered the run, and was not frozen. An exchange "
    "arrived if something of it arrived at that island; losses that a killed island had not written yet count as arrived. An island that dies or freezes is waited for once, {patience} s at most; a "
    "death is noticed at once by the islands that wait for it."
)


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {_PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--schedule", metavar="FILE", help="what happens (default: a death, a freeze, a cut, a new island)"
    )
    parser.add_argument(
        "--coordinator-away",
        type=int,
        nargs=2,
        metavar=("FROM", "TO"),
        help="iterations of the run between which there is no coordinator (default, without --schedule: 770 900)",
    )
    parser.add_argument(
        "--kill-every",
        type=float,
        metavar="SECONDS",
        help="instead of a schedule: kill -9 of an island, drawn by the seed, and start it at once",
    )
    parser.add_argument(
        "--kills", type=int, metavar="N", help="end the run after so many (default: near its last iteration)"
    )
    parser.add_argument("--islands", type=int, default=4, metavar="S", help="slots (default 4)")
    parser.add_argument("--config", default="configs/tiny/llama_1m.yaml", metavar="FILE", help="what is trained")
    parser.add_argument("--iterations", type=int, default=1200, metavar="N", help="to train (default 1200)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="SEED", help="a run with each (default 1)")
    parser.add_argument(
        "--undisturbed", action="store_true", help="train as many updates without any event, too, and compare"
    )
    parser.add_argument(
        "--rtt",
        type=float,
        default=_RTT,
        metavar="MS",
        help=f"round trip between two islands, in ms (default {_RTT:g})",
    )
    parser.add_argument(
        "--link-loss",
        type=float,
        default=0.0,
        metavar="P",
        help="share of packets lost between two islands (default 0)",
    )
    parser.add_argument("--flags", default="", help="more flags of every island, as one word: '--transport udp'")
    parser.add_argument(
        "--out", default="runs/churn", metavar="FOLDER", help="for runs and results (default runs/churn)"
    )
    parser.add_argument("--replace", action="store_true", help="write over the results that are there")
    return parser


def schedule_of(args: argparse.Namespace) -> Schedule:
    """Return the schedule of events, unless islands are killed at random. Raise :class:`UsageError` for a wrong one."""
    if args.kill_every is not None:
        if args.schedule is not None:
            raise refuse("--kill-every", args.kill_every, "is instead of --schedule")
        if not args.kill_every > 0:
            raise refuse("--kill-every", args.kill_every, "must be above 0")
        if args.kills is not None and args.kills < 1:
            raise refuse("--kills", args.kills, "must be at least 1")
        return Schedule([])
    if args.kills is not None:
        raise refuse("--kills", args.kills, "needs --kill-every")
    if args.schedule is not None:
        return read_schedule(args.schedule, args.islands, args.iterations)
    for name, least in (("islands", 4), ("iterations", DEFAULT.events[-1].at + 1)):
        if getattr(args, name) < least:
            raise refuse(f"--{name}", getattr(args, name), f"must be at least {least} without --schedule")
    return DEFAULT


def _link(rtt: float, loss: float) -> Link:
    """Return one direction of a link of ``rtt`` ms."""
    return Link(delay=rtt / 2000, loss=loss)


@contextlib.contextmanager
def _network(machines: int, link: Link) -> Iterator[tuple[Network, list[str]]]:
    """Yield a network, and the features that it lacks. Raise :class:`UsageError` if ``link`` needs one of them."""
    try:
        check_lab()
    except MissingRequirement as missing:
        if link != _link(_RTT, 0.0):
            raise UsageError(f"--rtt, --link-loss: {missing}") from None
        yield Loopback(), [f"nobody is cut off: {missing}"]
        return
    with lab_of(machines, link) as lab:
        yield lab, []


class Runs:
    """Runs of ``args`` in ``network``."""

    def __init__(self, args: argparse.Namespace, network: Network) -> None:
        self._args, self._network = args, network
        self._as_meant = (0, -signal.SIGKILL, *([] if args.kills is None else [STOPPED]))
        schedule = schedule_of(args)
        self._schedule = schedule if network.can_cut else without_cuts(schedule)
        self._away = args.coordinator_away or (
            DEFAULT_AWAY if args.schedule is None and args.kill_every is None else None
        )

    def disturbed(self, seed: int, folder: Path) -> Results:
        """Run the islands with the events."""
        args = self._args

        def events(islands: Islands) -> Events:
            def tell(line: str) -> None:
                print(line, flush=True)

            if args.kill_every is not None:
                return Kills(islands, args.kill_every, int(_KILLS_UNTIL * args.iterations), seed, args.kills, tell)
            return Director(islands, self._schedule, self._away and tuple(self._away), tell)

        slots = first_islands(self._schedule, args.islands)
        return self._run(seed, folder, args.iterations, slots, events)

    def undisturbed(self, seed: int, folder: Path, updates: int) -> Results:
        """Run all islands without events. ``updates``: of all islands together."""
        iterations = round(updates / self._args.islands)
        print(f"nothing happens to {iterations} iterations of {self._args.islands} islands …", flush=True)
        nothing = Schedule([])
        return self._run(
            seed, folder, iterations, range(self._args.islands), lambda islands: Director(islands, nothing, None)
        )

    def _run(
        self, seed: int, out: Path, iterations: int, slots: Sequence[int], make_events: Callable[[Islands], Events]
    ) -> Results:
        args = self._args
        flags = ["--config", args.config, "--islands", str(args.islands), "--train-iters", str(iterations)]
        own = _FLAGS | {"--seed": seed}
        if "diloco" in args.flags.split():  # every absence ends in a copy
            del own["--island-keep"]
        flags += [str(word) for pair in own.items() for word in pair] + args.flags.split()
        saved = str(out / "saved")
        flags += ["--save", saved, "--load", saved, "--save-replicas", "--delivery-log", str(out / "log")]
        out.mkdir(parents=True, exist_ok=True)
        islands = Islands(self._network, out, flags)
        began = time.monotonic()
        try:
            events = make_events(islands)
            islands.serve()
            for slot in slots:
                islands.start(slot)
            while not islands.over:
                islands.read()
                events.direct()
                _check(islands, iterations, self._as_meant)
                time.sleep(0.05)
            islands.read()
        finally:
            islands.end()
        _check(islands, iterations, self._as_meant)
        iterations = min(iterations, islands.iteration)
        there = sorted({life.slot for life in islands.lives})
        found = [Island.read(slot, islands.lives, out / "log") for slot in there]
        notes = [f"It took {time.monotonic() - began:.0f} s"]
        failed = [life for life in islands.lives if life.process.returncode not in self._as_meant]
        notes += [f"island {life.slot} ended with status {life.process.returncode}" for life in failed]
        words = " ".join(flags).replace("--sync-interval=", "--sync-interval ").split()
        interval = int(words[len(words) - words[::-1].index("--sync-interval")])  # the last one counts
        return Results(found, events.happened, iterations, notes, interval)


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Make the runs, their tables and pictures."""
    out, link = Path(args.out), _link(args.rtt, args.link_loss)
    several = len(args.seeds) > 1
    parts, pairs = [], []
    with _network(args.islands + 1, link) as (network, notes):
        runs = Runs(args, network)
        for seed in args.seeds:
            results = runs.disturbed(seed, out / f"seed_{seed}")
            parts += [f"## Seed {seed}", ""] if several else []
            parts += _report(results)
            _draw(results, out / (f"churn_seed_{seed}.png" if several else "churn.png"))
            if args.undisturbed:
                pairs.append((results, runs.undisturbed(seed, out / f"seed_{seed}_undisturbed", results.updates)))
    if pairs:
        parts += ["## Against islands to which nothing happens", "", *compared(args.seeds, pairs), ""]
    date, command, *machine = made_with(_PROGRAM, argv)
    what = f"{args.islands} slots, {results.end} iterations of {args.config}; links of {args.rtt:g} ms round trip, {100 * args.link_loss:g} % loss"
    lines = ["# Training with islands that come and go", ""]
    lines += [f"- {line}" for line in (date, command, what, *machine, *notes)]
    lines += ["", *parts, _EXPLANATION.format(patience=_FLAGS["--island-patience"]), ""]
    text = "\n".join(lines)
    print("\n" + text)
    write_text(out / "churn.md", text)
    print(f"wrote {out / 'churn.md'}, and pictures next to it")


def _check(islands: Islands, end: int, as_meant: Collection[int]) -> None:
    """Raise :class:`RuntimeError` if an island has ended before iteration ``end``, with a status that is not one of ``as_meant``."""
    for life in islands.lives:
        if life.process.poll() not in (None, *as_meant) and life.iteration < end:
            raise RuntimeError(
                f"island {life.slot}: status {life.process.returncode}; the end of {life.log}:\n{life.tail()}"
            )


def _report(results: Results) -> list[str]:
    """Return lines about a run."""
    lines = [*(f"- {note}" for note in results.notes), f"- An iteration took {results.usual():.2f} s (median)", ""]
    lines += [*markdown(results.events()), "", *markdown(results.table()), ""]
    return [*lines, f"{results.headline()}. {results.whole()}", ""]


def _draw(results: Results, path: Path) -> None:
    title = f"{len(results.islands)} islands that come and go: {results.headline()}"
    replace_file(path, lambda aside: picture(results, title, aside))


def main(argv: list[str] | None = None) -> int:
    """Run the program."""
    argv = sys.argv[1:] if argv is None else argv
    args = parser().parse_args(argv)
    with usage_errors(_PROGRAM):
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
