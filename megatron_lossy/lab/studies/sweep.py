"""``python -m megatron_lossy.lab sweep``: the same training at several loss rates, and the table of their cost.

All rates run in one launch, since starting takes longer than a small model's first hundred iterations. Each has a
folder of its own. Complete runs are kept, and interrupted ones continue from their checkpoints.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...base.checkpoints import latest_iteration
from ...base.errors import UsageError, check_package, refuse, usage_errors, with_origin
from ...config import LossyConfig
from ...config.settings import from_origin
from ..train.arguments import configurations, make_parser, read_arguments
from ..train.config import TrainConfig
from ..train.facts import check_flags
from ..train.log import WHOSE, Console, clock
from ..train.metrics import METRICS_FILE
from ..train.process import launched_ranks, quiet_imports, rank_errors, require_megatron
from ..train.saved import check_folders

PROGRAM = "megatron_lossy.lab.studies.sweep"

# Flags that the sweep sets itself, or that would end a run early.
_NOT_HERE = ("save", "load", "metrics_dir", "exit_interval", "p_grad", "p_param")
# Flags of each run that follow from the sweep's own.
_DERIVED = [*from_origin(["--save", "--load"], "of --out"), *from_origin(["--p-grad", "--p-param"], "of --rates")]
_SECONDS_BETWEEN_LINES = 10


@dataclasses.dataclass(frozen=True)
class Rate:
    """One run of the sweep."""

    rate: float
    config: TrainConfig
    lossy_config: LossyConfig

    @property
    def done(self) -> int:
        """Number of iterations in its latest checkpoint."""
        return latest_iteration(self.config.save) or 0

    @property
    def remaining(self) -> int:
        """Iterations still to train."""
        return self.config.train_iters - self.done


def plan(namespace: argparse.Namespace) -> list[Rate]:
    """The runs that the command line asks for. Raises :class:`UsageError`, also for a folder with other runs."""
    for name in ("rates", "out"):
        if getattr(namespace, name) is None:
            raise UsageError(f"--{name}: needs a value")
    for name in _NOT_HERE:
        if getattr(namespace, name):
            raise refuse(f"--{name.replace('_', '-')}", getattr(namespace, name), "cannot be given to a sweep")
    if len(set(namespace.rates)) != len(namespace.rates):
        raise refuse("--rates", " ".join(map(str, namespace.rates)), "must differ from each other")
    base, lossy = configurations(namespace)
    base.check_world(launched_ranks())
    rates = [_rate(base, lossy, rate, namespace.out) for rate in namespace.rates]
    check_package("matplotlib", "--out", namespace.out, "matplotlib")
    for rate in rates:
        check_folders(rate.config, rate.lossy_config)
        _check_ranks(rate)
    for rate in rates:
        _check(rate)
    return rates


def _rate(base: TrainConfig, lossy: LossyConfig, rate: float, out: str) -> Rate:
    name = f"p_{rate:.2f}" if round(rate, 2) == rate else f"p_{rate!r}"
    folder = os.path.join(out, name)
    config = dataclasses.replace(
        base,
        save=folder,
        load=folder,
        save_interval=base.save_interval or max(1, base.train_iters // 4),
        tensorboard_dir=base.tensorboard_dir and os.path.join(base.tensorboard_dir, name),
        wandb_exp_name=name if base.wandb_project else None,
    )
    try:
        # With saved replicas, an interrupted run ends as it would have without the interruption.
        log = lossy.delivery_log and os.path.join(lossy.delivery_log, name)
        return Rate(
            rate,
            config,
            dataclasses.replace(lossy, p_grad=rate, p_param=rate, save_replicas=True, delivery_log=log),
        )
    except UsageError as error:
        raise UsageError(f"--rates {rate}: {with_origin(error)}") from None


def _check(rate: Rate) -> None:
    """Find everything that would end the run of ``rate`` at its start, before another run has trained."""
    try:
        check_flags(rate.config, rate.lossy_config, launched_ranks())
    except UsageError as error:
        raise UsageError(f"--rates {rate.rate:g}: {with_origin(error)}") from None


def _check_ranks(rate: Rate) -> None:
    """Raise :class:`UsageError` for runs with other numbers of ranks: they lose other units."""
    metrics = Path(rate.config.save) / METRICS_FILE
    mine = rate.config.virtual_workers or launched_ranks()
    if metrics.is_file():
        try:
            ranks = json.loads(metrics.open().readline() or "{}").get("world_size", mine)
        except (ValueError, AttributeError):
            raise refuse("--out", rate.config.save, f"{METRICS_FILE} there is damaged") from None
        if ranks != mine:
            raise refuse("--out", rate.config.save, f"holds a run of {ranks} ranks, not {mine}")


class SweepConsole(Console):
    """Occasional lines, with an estimate of the time for all remaining runs."""

    def __init__(self, rates: Sequence[Rate]) -> None:
        self._total = sum(rate.remaining for rate in rates)
        self._earlier = 0  # the sweep's iterations before the current run
        self._first = 0  # the first iteration of the current run
        self._label = ""
        self._started = self._printed = time.monotonic()

    def start(self, rate: Rate) -> None:
        """Announce the run of ``rate``."""
        self._label, self._first = f"p = {rate.rate:g}", rate.done
        whence = f"continues after iteration {rate.done}" if rate.done else "starts"
        print(f"{self._label}: {whence}, to {rate.config.train_iters}", flush=True)

    def finish(self, rate: Rate, diverged: str | None) -> None:
        """Note the end of the run of ``rate``."""
        if diverged:
            print(f"{self._label}: stopped, {diverged}", flush=True)
        self._earlier += rate.config.train_iters - self._first

    def header(self, text: str) -> None:
        print(f"{self._label}: {text}", flush=True)

    def note(self, text: str) -> None:
        pass

    def train(self, record: dict[str, Any], train_iters: int, global_batch_size: int) -> None:
        now = time.monotonic()
        if now - self._printed < _SECONDS_BETWEEN_LINES:
            return
        self._printed = now
        done = self._earlier + record["iteration"] - self._first
        elapsed = now - self._started
        left = elapsed / done * (self._total - done)
        print(
            f"{self._label}: iteration {record['iteration']}/{train_iters}, lm loss {record['lm loss']:.3f}, "
            f"elapsed {clock(elapsed)}, about {clock(left)} left for the sweep",
            flush=True,
        )

    def valid(self, record: dict[str, Any]) -> None:
        whose = WHOSE.get(record["weights"], "")
        print(
            f"{self._label}: iteration {record['iteration']}, validation loss {record['lm loss']:.3f}, "
            f"PPL {record['lm loss PPL']:.2f}{whose}",
            flush=True,
        )


def sweep(rates: Sequence[Rate]) -> bool:
    """Train the incomplete runs, in order; returns whether all are complete. A collective call."""
    todo = [rate for rate in rates if rate.remaining > 0]
    if not todo:
        return True
    quiet_imports()
    require_megatron()
    from ...base import device

    device.prepare()
    from ..train.loop import train
    from ..train.parallel import world

    console = SweepConsole(todo)
    first = os.environ.get("RANK", "0") == "0"
    with world(todo[0].config):
        for rate in todo:
            if first:
                console.start(rate)
            summary = train(rate.config, rate.lossy_config, console)
            if not summary["finished"] and not summary["diverged"]:
                return False
            if first:
                console.finish(rate, summary["diverged"])
    return True


def main(arguments: Sequence[str] | None = None) -> None:
    """Train at every rate, then print and write the report."""
    with usage_errors(PROGRAM):
        parser = make_parser("python -m megatron_lossy.lab sweep", "Train the same at several loss rates, and compare.")
        parser.add_argument(
            "--rates", type=float, nargs="+", metavar="P", help="loss rates of gradients and parameters"
        )
        parser.add_argument("--out", metavar="FOLDER", help="a folder per rate, and the report")
        rates = plan(read_arguments(parser, sys.argv[1:] if arguments is None else arguments, _DERIVED))
        with rank_errors(PROGRAM):
            complete = sweep(rates)
            if os.environ.get("RANK", "0") != "0":
                return
            if not complete:
                print("interrupted; run the same command again to continue")
                return
            _report(Path(rates[0].config.save).parent)


def _report(folder: Path) -> None:
    from ..report import loss_table, read_runs, write_report

    runs = read_runs(folder)
    table = loss_table(runs)
    print(table.text())
    for file in write_report(runs, table, folder):
        print(f"wrote {file}")


if __name__ == "__main__":
    main()
