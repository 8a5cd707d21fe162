"""Completion times of megatron_lossy.lab.studies.fct beside those of the same messages, with the same losses, in ns-3.

    pip install 'megatron-lossy[ns3]'
    python scripts/fct_ns3.py

ns-3 has both fat-trees, every queue and link of them, and the two ends of a message as applications
(scripts/fct_ns3.cc), which were written apart from the model. Writes fct_ns3_DATE.md and .csv. A test compares what is
in the CSV with the model of the day.
"""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import importlib.util
import itertools
import os
import shlex
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lossy.base.coding import Layout
from megatron_lossy.base.device.environment import processor, versions
from megatron_lossy.base.errors import ArgumentParser, UsageError, refuse, usage_errors
from megatron_lossy.base.files import check_folder, replace_file, write_text
from megatron_lossy.lab.studies.fct.command import make_scheme
from megatron_lossy.lab.studies.fct.schemes import Flow, Losses, Scheme
from megatron_lossy.lab.studies.fct.schemes import Path as Way

ROOT = Path(__file__).resolve().parent.parent
APPLICATIONS = Path(__file__).with_suffix(".cc")
SCHEMES: dict[str, dict[str, Any]] = {
    "SR": {"recovery": "selective-repeat"},
    "LoWAR (100,10)": {"recovery": "uniform", "block": 100, "parity": 10},
    "SMART gradients (100,50)": {"recovery": "smart", "block": 100, "parity": 50},
    # Of 1 % hardly anything is sent again.
    "SMART gradients (100,10), 10 % high": {"recovery": "smart", "block": 100, "parity": 10, "fraction": 0.1},
    "SMART activations (100,10)": {"recovery": "tolerant", "block": 100, "parity": 10},
}
#: By what the applications call them.
RECOVERIES = {"selective-repeat": 0, "uniform": 1, "smart": 2, "tolerant": 3}


@dataclass(frozen=True)
class Cell:
    """Messages of ``packets`` under the same conditions. ``burst``: mean packets lost in a row, 0: independent losses."""

    scheme: str
    packets: int
    rate: float
    burst: float
    timeout: float
    flows: int
    seed: int

    @property
    def recovery(self) -> Scheme:
        """The scheme of the model."""
        return make_scheme(self.scheme, SCHEMES[self.scheme], self.timeout)

    def losses(self) -> Iterator[Losses]:
        """Those of each message."""
        return (Losses(self.rate, self.seed, flow, self.burst or None) for flow in range(self.flows))

    def model(self) -> list[Flow]:
        """What becomes of each message in the model."""
        scheme, way = self.recovery, Way()
        return [scheme.flow(way, self.packets, losses) for losses in self.losses()]


@dataclass(frozen=True)
class Row:
    """A cell: mean and P99 in microseconds, packets sent again and delivered as zeros, of all its messages.

    ``farthest``: the largest difference between ns-3 and the model for one message, over the model's time.
    """

    cell: Cell
    ns3_mean: float
    model_mean: float
    ns3_p99: float
    model_p99: float
    ns3_again: int
    model_again: int
    ns3_zeros: int
    model_zeros: int
    farthest: float

    @property
    def differences(self) -> tuple[float, float]:
        """By which share ns-3's mean and P99 are above the model's."""
        return self.ns3_mean / self.model_mean - 1, self.ns3_p99 / self.model_p99 - 1


_COLUMNS = (*fields(Cell), *fields(Row)[1:])


class Network:
    """Both fat-trees in ns-3. One per process; the start takes up to a minute."""

    def __init__(self, way: Way) -> None:
        import ns  # noqa: F401  # ns-3's headers and libraries
        from cppyy import cppdef, gbl

        cppdef(APPLICATIONS.read_text(encoding="utf-8"))
        self._numbers = gbl.std.vector["int"]
        self._way = way
        self._study = gbl.fct.Study(way.inside, way.hop_delay, way.between, way.delay, way.payload)
        self.nodes = int(self._study.nodes)

    def send(self, cell: Cell, late: bool) -> list[Flow]:
        """What becomes of each message of ``cell``."""
        scheme, given = cell.recovery, SCHEMES[cell.scheme]
        for losses in cell.losses():
            self._study.Add(*(self._numbers(numbers.tolist()) for numbers in _losses(scheme, given, cell, losses)))
        bound, rto = getattr(scheme, "bound", 0.0), cell.timeout * self._way.rtt
        self._study.Run(RECOVERIES[given["recovery"]], given.get("block", 0), given.get("parity", 0), bound, rto, late)
        lists = [list(values) for values in (self._study.times, self._study.parities, self._study.again)]
        return [
            Flow(time, cell.packets, parities, again, zeros)
            for time, parities, again, zeros in zip(*lists, list(self._study.zeros), strict=True)
        ]


def _losses(scheme: Scheme, given: dict[str, Any], cell: Cell, losses: Losses) -> tuple[np.ndarray, ...]:
    """int: what is lost of data and of parity, how often each must be sent again, and which are of high priority."""
    high = np.zeros(0, dtype=int)
    behind = np.zeros(0, dtype=int)  # by parity: the data that is sent before it
    if given["recovery"] == "smart":
        high = losses.important(cell.packets, int(scheme.fraction * cell.packets + 0.5))
        behind = np.full(Layout(len(high), given["block"], given["parity"]).parities, cell.packets)
    elif given["recovery"] != "selective-repeat":
        parities = Layout(cell.packets, given["block"], given["parity"]).parities
        behind = np.minimum((np.arange(parities) // given["parity"] + 1) * given["block"], cell.packets)
    lost, lost_parity = losses.first(cell.packets, behind)
    return lost.astype(int), lost_parity.astype(int), losses.again(cell.packets), high


def compare(cell: Cell, sent: Sequence[Flow]) -> Row:
    """``sent`` in ns-3 beside the model."""
    model = cell.model()
    times, modelled = np.array([flow.time for flow in sent]), np.array([flow.time for flow in model])
    assert [flow.parities for flow in sent] == [flow.parities for flow in model]
    return Row(
        cell,
        float(times.mean()),
        float(modelled.mean()),
        float(np.percentile(times, 99)),
        float(np.percentile(modelled, 99)),
        sum(flow.again for flow in sent),
        sum(flow.again for flow in model),
        sum(flow.zeros for flow in sent),
        sum(flow.zeros for flow in model),
        float(np.abs(times / modelled - 1).max()),
    )


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """One line per cell."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(field.name for field in _COLUMNS)
        for row in rows:
            values = asdict(row.cell) | asdict(row)
            numbers = (values[field.name] for field in _COLUMNS)
            writer.writerow(f"{value:.9g}" if isinstance(value, float) else value for value in numbers)


def read_csv(path: Path) -> list[Row]:
    """What :func:`write_csv` wrote."""
    kinds = {"str": str, "int": int, "float": float}
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            values = [kinds[field.type](line[field.name]) for field in _COLUMNS]
            of_cell = len(fields(Cell))
            rows.append(Row(Cell(*values[:of_cell]), *values[of_cell:]))
    return rows


def summary(rows: Sequence[Row]) -> str:
    """The largest differences, in a sentence or two."""
    mean, p99 = np.abs([row.differences for row in rows]).max(axis=0)
    equal = sum((row.ns3_again, row.ns3_zeros) == (row.model_again, row.model_zeros) for row in rows)
    return (
        f"Largest difference between ns-3 and the model: {mean:.2%} of a mean, {p99:.2%} of a P99, "
        f"{max(row.farthest for row in rows):.2%} of a message. As many packets were sent again, and as many delivered as "
        f"zeros, in {equal} of {len(rows)} cells; messages: {sum(row.cell.flows for row in rows)}."
    )


def cells(flags: Namespace) -> list[Cell]:
    """What is to be compared. Without losses all messages are the same, and there is one."""
    result = []
    for scheme, packets, rate, burst in itertools.product(SCHEMES, flags.packets, flags.rates, flags.bursts):
        if rate or burst == flags.bursts[0]:
            flows = max(1, flags.cell // packets) if rate else 1
            result.append(Cell(scheme, packets, rate, burst, flags.timeout, flows, flags.seed))
    return result


def parser() -> ArgumentParser:
    """The command line."""
    parser = ArgumentParser(prog="python scripts/fct_ns3.py", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--packets", type=int, nargs="+", default=[64, 256, 1024, 4096], metavar="N",
        help="of data in a message (default 64 256 1024 4096)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[0.0, 0.001, 0.01, 0.05], metavar="P",
        help="share of packets lost (default 0 0.001 0.01 0.05)",
    )  # fmt: skip
    parser.add_argument(
        "--bursts", type=float, nargs="+", default=[0.0, 8.0], metavar="N",
        help="mean packets lost in a row; 0: independent (default 0 8)",
    )  # fmt: skip
    parser.add_argument("--timeout", type=float, default=2.0, metavar="N", help="RTO in round trips (default 2)")
    parser.add_argument(
        "--cell", type=int, default=16_384, metavar="N", help="packets of data per cell, in messages (default 16384)"
    )
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of the losses (default 1)")
    parser.add_argument(
        "--late-parity", action="store_true",
        help="let the receiver use parity for what is sent again as well, which the model does not: how much that is",
    )  # fmt: skip
    results = ROOT / "benchmarks" / "results"
    parser.add_argument("--out", type=Path, default=results, metavar="FOLDER", help="default benchmarks/results")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The program."""
    argv = sys.argv[1:] if argv is None else argv
    with usage_errors("scripts/fct_ns3.py"):
        run(parser().parse_args(argv), argv)
    return 0


def run(flags: Namespace, argv: Sequence[str]) -> None:
    """Compare, and write what was found. Raises :class:`UsageError`."""
    for rate in flags.rates:
        if not 0 <= rate < 0.5:
            raise refuse("--rates", rate, "must be in [0, 0.5)")
    check_folder("--out", flags.out)
    stem = f"fct_ns3_{datetime.date.today().isoformat()}"
    if importlib.util.find_spec("ns") is None:
        raise UsageError("needs the package ns3: pip install 'megatron-lossy[ns3]'")
    network, rows = Network(Way()), []
    for cell in cells(flags):
        rows.append(compare(cell, network.send(cell, flags.late_parity)))
        mean, p99 = rows[-1].differences
        print(f"{cell}: mean {mean:+.2%}, P99 {p99:+.2%}", flush=True)
    packages = versions() | {name: importlib.metadata.version(name) for name in ("ns3", "cppyy")}
    lines = [
        "# Completion times in ns-3 and in the model",
        "",
        f"- Date: {stem[-10:]}",
        f"- Command: `{shlex.join(['python', 'scripts/fct_ns3.py', *argv])}`",
        f"- Hardware: {processor()}, Linux {os.uname().release}",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in packages.items())}",
        f"- Two k=4 fat-trees, {network.nodes} nodes. Times in microseconds; RTO {flags.timeout:g} round trips.",
        f"- Numbers: [{stem}.csv]({stem}.csv)",
        "",
        "Both had the same losses, message by message. " + summary(rows),
        "",
    ]
    flags.out.mkdir(parents=True, exist_ok=True)
    replace_file(flags.out / f"{stem}.csv", lambda path: write_csv(rows, path))
    write_text(flags.out / f"{stem}.md", "\n".join(lines))
    print(f"\n{summary(rows)}\nwrote {flags.out / stem}.md, .csv")


if __name__ == "__main__":
    sys.exit(main())
