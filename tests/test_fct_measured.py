"""The model of completion times against ns-3 message by message, and over the emulated link against measurements."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import fct_lab, run_wan, udp_exchange, udp_priority, udp_soak
from benchmarks.fct.__main__ import make_scheme
from benchmarks.fct.schemes import Losses, SelectiveRepeat, Smart, Uniform
from benchmarks.fct.schemes import Path as Way
from benchmarks.fct_lab import OnTimeout, contestants
from tests.test_lab import needs_lab

pytestmark = pytest.mark.shows(
    "completion times against ns-3, message by message",
    "completion times over an emulated link: models, tables, refusals",
    device=False,
)

# --- against what ns-3 gave for the same losses, message by message (docs/fct.md) -------------------------------------


ROWS = list(csv.DictReader((Path(__file__).parents[1] / "benchmarks/results/fct_ns3_2026-11-22.csv").open()))
SCHEMES = {
    "SR": {"recovery": "selective-repeat"},
    "LoWAR (100,10)": {"recovery": "uniform", "block": 100, "parity": 10},
    "SMART gradients (100,50)": {"recovery": "smart", "block": 100, "parity": 50},
    "SMART gradients (100,10), 10 % high": {"recovery": "smart", "block": 100, "parity": 10, "fraction": 0.1},
    "SMART activations (100,10)": {"recovery": "tolerant", "block": 100, "parity": 10},
}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_model_agrees_with_ns3(scheme):
    rows = [
        {name: float(text) for name, text in row.items() if name != "scheme"} for row in ROWS if row["scheme"] == scheme
    ]
    assert {row["packets"] for row in rows} >= {256, 1024} and {row["rate"] for row in rows} >= {0, 0.01, 0.05}
    assert sum(row["ns3_again"] for row in rows) > 10  # something was sent again
    for row in rows:
        model, number = make_scheme(scheme, SCHEMES[scheme], row["timeout"]), range(int(row["flows"]))
        losses = [Losses(row["rate"], int(row["seed"]), flow, row["burst"] or None) for flow in number]
        flows = [model.flow(Way(), int(row["packets"]), one) for one in losses]
        times = np.array([flow.time for flow in flows])
        assert (times.mean(), np.percentile(times, 99)) == pytest.approx((row["ns3_mean"], row["ns3_p99"]), rel=0.02)
        assert sum(flow.again for flow in flows) == row["ns3_again"], row
        assert sum(flow.zeros for flow in flows) == row["ns3_zeros"], row


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
    # Of seven packets each is sent twice or three times at 5 %, and nothing besides the data where nothing is lost.
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
