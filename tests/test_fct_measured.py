"""The model of completion times against ns-3 message by message, and over the emulated link beside what was measured."""

import csv
import datetime
import importlib.util
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import fct_lab, udp_priority, udp_soak
from benchmarks.exchange.timeouts import Timeouts
from benchmarks.fct_lab import OnTimeout, contestants
from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.studies.fct.path import Losses
from megatron_lossy.lab.studies.fct.path import Path as Way
from megatron_lossy.lab.studies.fct.schemes import SelectiveRepeat, Smart, Uniform
from scripts import fct_ns3
from tests.programs import run_program
from tests.test_lab import needs_lab

pytestmark = pytest.mark.shows(
    "completion times against ns-3, message by message",
    "completion times over an emulated link: models, tables, refusals",
    device=False,
)

# --- against what ns-3 gave for the same losses, message by message (scripts/fct_ns3.py) -----------------------------


ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "fct_ns3.py"
#: The latest results; the date is in the name.
ROWS = fct_ns3.read_csv(max((ROOT / "benchmarks" / "results").glob("fct_ns3_*.csv")))


def differences(row, flows):
    times = np.array([flow.time for flow in flows])
    return abs(times.mean() / row.ns3_mean - 1), abs(np.percentile(times, 99) / row.ns3_p99 - 1)


@pytest.mark.parametrize("scheme", fct_ns3.SCHEMES)
def test_the_model_agrees_with_ns3(scheme):
    rows = [row for row in ROWS if row.cell.scheme == scheme]
    assert {row.cell.packets for row in rows} >= {256, 1024} and {row.cell.rate for row in rows} >= {0, 0.01, 0.05}
    assert sum(row.ns3_again for row in rows) > 10  # something was sent again
    for row in rows:
        flows = row.cell.model()
        assert max(differences(row, flows)) < 0.02, row
        assert sum(flow.again for flow in flows) == row.ns3_again, row
        assert sum(flow.zeros for flow in flows) == row.ns3_zeros, row


@pytest.mark.parametrize("scheme", fct_ns3.SCHEMES)
def test_the_comparison_would_tell(scheme):
    """Another RTO, other losses: further away than the limit in some cell."""
    rows = [row for row in ROWS if row.cell.scheme == scheme and row.cell.rate]
    for change in ({"timeout": 3.0}, {"seed": 99}):
        assert any(max(differences(row, replace(row.cell, **change).model())) > 0.02 for row in rows), change


def test_what_is_written_is_read_again(tmp_path):
    fct_ns3.write_csv(ROWS, tmp_path / "rows.csv")
    assert fct_ns3.read_csv(tmp_path / "rows.csv") == ROWS


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--packets", "0"], "--packets 0: must be in"),
        (["--rates", "0.7"], "--rates 0.7: must be in"),
        (["--bursts", "0.5"], "--bursts 0.5: must be 0, or at least"),
        (["--timeout", "1"], "--timeout 1.0: must be above 1"),
        (["--cell", "0"], "--cell 0: must be at least 1"),
        (["--seed", "-1"], "--seed -1: must be at least 0"),
        (["--rates", "some"], "--rates: invalid float value: 'some'"),
        ([], "needs the package ns3: pip install 'megatron-lossy[ns3]'"),
    ],
)
def test_what_it_refuses(monkeypatch, tmp_path, arguments, error):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as raised:
        fct_ns3.run(fct_ns3.parser().parse_args([*arguments, "--out", str(tmp_path)]), arguments)
    assert error in str(raised.value) and not list(tmp_path.iterdir())


def test_results_are_kept(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for ahead in (0, 1):  # it may be midnight in between
        day = datetime.date.today() + datetime.timedelta(days=ahead)
        (tmp_path / f"fct_ns3_{day}.csv").write_text("kept")
    with pytest.raises(UsageError, match="fct_ns3_.*.csv is there already; --overwrite writes over it"):
        fct_ns3.run(fct_ns3.parser().parse_args(["--out", str(tmp_path)]), [])
    with pytest.raises(UsageError, match="needs the package ns3"):
        fct_ns3.run(fct_ns3.parser().parse_args(["--out", str(tmp_path), "--overwrite"]), [])


def test_the_command_says_what_is_wrong_in_one_line(tmp_path):
    command = [sys.executable, str(SCRIPT), "--rates", "2", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr == "scripts/fct_ns3.py: error: --rates 2.0: must be in [0, 0.5)\n"


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ns") is None, reason="no ns3")
def test_ns3_gives_the_same_again(tmp_path):
    small = ["--packets", "256", "--rates", "0.05", "--bursts", "0", "--cell", "2048"]
    done = subprocess.run([sys.executable, str(SCRIPT), *small, "--out", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (table,) = tmp_path.glob("*.csv")
    rows = fct_ns3.read_csv(table)
    assert [row.cell.scheme for row in rows] == list(fct_ns3.SCHEMES)
    for row in rows:
        assert max(map(abs, row.differences)) < 0.02 and row.ns3_again == row.model_again


# --- over the emulated link: schemes, tables, and a small run (benchmarks/fct_lab.py) --------------------------------


WAY = Way(1e9, 0.1, 10_000, 0.0, 1408, 72)


def test_the_model_of_the_link():
    """100 Mbit/s and 10 ms one way: a packet of 1,480 bytes takes 118.4 µs, and as long again to be there as a whole."""
    assert WAY.slot == pytest.approx(118.4)
    assert WAY.latency == pytest.approx(10_000 + 118.4)
    assert WAY.rtt == pytest.approx(20_000 + 118.4 + 72 * 0.08)


def test_timeouts_one_by_one():
    """The last of the packets that is lost k times comes k timeouts late; without loss nothing is."""
    scheme = OnTimeout(2.0)
    assert scheme.flow(WAY, 100, Losses(0.0, 1, 0)).time == pytest.approx(100 * WAY.slot + WAY.latency)
    for flow in range(20):
        losses = Losses(0.2, 3, flow)
        lost, _ = losses.first(50, np.zeros(0, dtype=np.int64))
        times = [
            (place + 1) * WAY.slot + (tries * (2 * WAY.rtt + WAY.slot) if gone else 0.0) + WAY.latency
            for place, (gone, tries) in enumerate(zip(lost, losses.again(50), strict=True))
        ]
        done = scheme.flow(WAY, 50, losses)
        assert done.time == pytest.approx(max(times))
        assert done.again == sum(int(tries) for gone, tries in zip(lost, losses.again(50), strict=True) if gone)


def test_every_contestant_has_its_model():
    kinds = [type(one.scheme(0.05, 745)) for one in contestants()]
    assert kinds == [OnTimeout, SelectiveRepeat, Uniform, Smart]
    ours = contestants()[-1]
    # Of seven packets each is sent twice or three times at 5 %, and nothing beside the data where nothing is lost.
    assert 100 < ours.scheme(0.05, 745).parity <= 250 and ours.scheme(0.0, 745).parity == 1


class Gate:
    """A socket whose datagrams are lost by turns."""

    def __init__(self, inner: socket.socket, every: int) -> None:
        self._inner, self._every, self._count = inner, every, 0

    def sendto(self, packet: bytes, where: tuple) -> None:
        self._count += 1
        if self._count % self._every:
            self._inner.sendto(packet, where)

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


@pytest.mark.parametrize("every", [10**9, 7])
def test_a_sender_on_timeout(every, monkeypatch):
    """Both ways at once, three times: every byte is there; a timeout late if a packet was lost, acknowledgements included."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = min(probe.getsockname()[1], 65534)
    monkeypatch.setattr(socket, "socket", lambda *how, real=socket.socket: Gate(real(*how), every))
    ranks = [Timeouts(rank, ["127.0.0.1"] * 2, port, [5000], (50e6, 0.05)) for rank in range(2)]
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        buffers = [torch.randn(10_000, generator=generator) for _ in range(2)]
        outputs = [torch.empty(5000) for _ in range(2)]
        started = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda rank: ranks[rank].reduce_scatter(outputs[rank], buffers[rank]), range(2)))  # noqa: B023
        took = time.monotonic() - started
        for rank in range(2):
            torch.testing.assert_close(outputs[rank], sum(buffer.chunk(2)[rank] for buffer in buffers))
        assert took >= 0.05 or every != 7
    for rank in ranks:
        rank.close()


def made(args):
    """Times of every kind: 1 to 100 ms, in the model 2 to 200."""
    keys = [(one.name, loss, size) for one in reversed(contestants()) for loss in args.loss for size in args.mebibytes]
    measured = {key: [float(number) for number in range(1, 101)] for key in keys}
    return measured, {key: [2 * time for time in times] for key, times in measured.items()}


def test_tables_and_picture(tmp_path):
    args = fct_lab.parser().parse_args(["--mebibytes", "1", "4", "--loss", "0", "0.05"])
    measured, model = made(args)
    lines = fct_lab.table(args, measured, model).splitlines()
    rows = [line for line in lines if "MiB" in line]
    assert len(rows) == 16 and rows[0] == "| 1 MiB | 0 % | on timeout | 50.5 | 50.5 | 99.0 | 101.0 | 101.0 | 198.0 |"
    assert [row.split("|")[3].strip() for row in rows[:4]] == [one.name for one in contestants()]
    found = list(csv.DictReader(fct_lab.values(measured, model).splitlines()))
    assert len(found) == 16 and {row["P99 ms"] for row in found} == {"99.010"}
    fct_lab.picture(args, measured, model, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("program", [fct_lab.main, udp_priority.main, udp_soak.main])
def test_without_root_one_line(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert program(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--messages", "1"], "--messages 1: must be at least 2"),
        (["--loss", "1.5"], "loss 1.5: must be in [0, 1)"),
    ],
)
def test_bad_flags(flags, error, tmp_path):
    done = run_program("benchmarks.fct_lab", "--out", str(tmp_path), *flags)
    assert done.returncode == 2 and error in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.shows("completion times of real datagrams over an emulated link", device=False)
@needs_lab
@pytest.mark.programs
@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    flags = ["--messages", "4", "--mebibytes", "0.25", "--loss", "0.02", "--out", str(tmp_path)]
    assert fct_lab.main(flags) == 0
    [folder] = tmp_path.glob("fct_lab_*")
    table = folder / "fct_lab.csv"
    rows = list(csv.DictReader(table.open()))
    assert [row["scheme"] for row in rows] == [one.name for one in contestants()]
    # No message is there before its bytes can be: 10 ms, and 0.25 MiB at 100 Mbit/s.
    assert all(float(row["P50 ms"]) > 30 and int(row["messages"]) == 4 for row in rows)
    assert (folder / "fct_lab.png").stat().st_size > 10_000
    assert "\n## Times\n\n20 ms, 100 Mbit/s" in (folder / "fct_lab.md").read_text()
