"""The model of completion times against ns-3 message by message, and over the emulated link beside what was measured."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fct_lab, run_wan, udp_exchange, udp_priority, udp_soak
from benchmarks.fct_lab import OnTimeout, contestants
from megatron_lossy.lab.studies.fct.schemes import Losses, SelectiveRepeat, Smart, Uniform
from megatron_lossy.lab.studies.fct.schemes import Path as Way
from scripts import fct_ns3
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


def made(args):
    """Times of every kind: 1 to 100 ms, in the model 2 to 200."""
    keys = [(one.name, loss, size) for one in reversed(contestants()) for loss in args.loss for size in args.mebibytes]
    measured = {key: [float(number) for number in range(1, 101)] for key in keys}
    return measured, {key: [2 * time for time in times] for key, times in measured.items()}


def test_tables():
    args = fct_lab.parser().parse_args(["--mebibytes", "1", "4", "--loss", "0", "0.05"])
    measured, model = made(args)
    lines = fct_lab.table(args, measured, model).splitlines()
    rows = [line for line in lines if "MiB" in line]
    assert len(rows) == 16 and rows[0] == "| 1 MiB | 0 % | on timeout | 50.5 | 50.5 | 99.0 | 101.0 | 101.0 | 198.0 |"
    assert [row.split("|")[3].strip() for row in rows[:4]] == [one.name for one in contestants()]


@pytest.mark.parametrize("program", [fct_lab.main, udp_priority.main, udp_soak.main, udp_exchange.main, run_wan.main])
def test_without_root_one_line(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert program(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"


@pytest.mark.shows("completion times of real datagrams over an emulated link", device=False)
@needs_lab
@pytest.mark.programs
@pytest.mark.slow
def test_a_small_run(tmp_path, capsys):
    flags = ["--messages", "4", "--mebibytes", "0.25", "--loss", "0.02", "--out", str(tmp_path)]
    assert fct_lab.main(flags) == 0
    [folder] = tmp_path.glob("fct_lab_*")
    text = (folder / "fct_lab.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if "MiB |" in line]
    assert [row[2] for row in rows] == [one.name for one in contestants()]
    # No message is there before its bytes can be: 10 ms, and 0.25 MiB at 100 Mbit/s.
    assert all(float(row[4]) > 30 for row in rows)
    assert "\n## Times\n\n20 ms, 100 Mbit/s, 4 messages" in text
