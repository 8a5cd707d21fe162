"""Completion times between data centers: closed forms, losses, the command, and every scheme against ns-3."""

import csv

import numpy as np
import pytest

from benchmarks.fct.__main__ import Condition, make_scheme, read, run_cell
from benchmarks.fct.schemes import Adaptive, Losses, Path, SelectiveRepeat, Smart, Tolerant, Uniform
from megatron_lossy.base.errors import UsageError
from tests.programs import ROOT, run_program

pytestmark = pytest.mark.shows("completion times without loss in closed form; the losses of a message", device=False)

PATH = Path()


def test_the_path():
    assert PATH.slot == pytest.approx(4158 * 8 / 100e3)
    assert PATH.latency == pytest.approx(408 + 7 * 4158 * 8 / 100e3 + 4158 * 8 / 400e3)
    assert PATH.rtt == pytest.approx(818.4, abs=0.1)
    assert Path(pairs=8).slot == pytest.approx(2 * PATH.slot) and Path(pairs=4).slot == PATH.slot
    assert [PATH.packets(size) for size in (1, 4096, 4097, 2**20)] == [1, 1, 2, 256]


@pytest.mark.parametrize("packets", [1, 99, 100, 101, 1000])
def test_without_loss(packets):
    """All packets and the way; parities only if data follows them."""
    none = Losses(0.0, 1, 0)
    plain = packets * PATH.slot + PATH.latency
    assert SelectiveRepeat().flow(PATH, packets, none).time == pytest.approx(plain)
    assert Smart().flow(PATH, packets, none).time == pytest.approx(plain)
    assert Adaptive().flow(PATH, packets, none).time == pytest.approx(plain)
    between = (packets - 1) // 100 * 10 * PATH.slot
    for scheme in (Uniform(100, 10), Tolerant(100, 10)):
        assert scheme.flow(PATH, packets, none).time == pytest.approx(plain + between)


@pytest.mark.parametrize("burst", [None, 6.0])
def test_rates_and_bursts(burst):
    """4 standard deviations, over 400 messages of 5,000 packets; those of bursts from the messages' own spread."""
    lost = np.array([Losses(0.05, 1, flow, burst).first(5000, np.array([], dtype=int))[0] for flow in range(400)])
    rates = lost.mean(axis=1)
    assert abs(rates.mean() - 0.05) < 4 * rates.std() / 20
    runs = np.diff(np.flatnonzero(np.diff(np.pad(lost.ravel(), 1).astype(int))))[::2]
    assert abs(runs.mean() - (burst or 1 / 0.95)) < 4 * runs.std() / np.sqrt(len(runs)) + 0.01
    assert not Losses(0.0, 1, 0, burst).first(100, np.array([3, 7]))[0].any()


def test_every_scheme_loses_the_same():
    data, parities = Losses(0.1, 1, 5).first(100, np.array([10, 20]))
    assert np.array_equal(data, Losses(0.1, 1, 5).first(100, np.array([], dtype=int))[0]) and len(parities) == 2
    assert not np.array_equal(data, Losses(0.1, 1, 6).first(100, np.array([], dtype=int))[0])
    assert not np.array_equal(data, Losses(0.1, 2, 5).first(100, np.array([], dtype=int))[0])


def test_the_adaptive_code_costs_nothing_without_loss_and_holds_the_bound_with_it():
    for p in (0.0, 0.005, 0.02, 0.05):
        condition = Condition(16.8e6, p)
        adaptive = run_cell("adaptive", {"recovery": "adaptive"}, condition, PATH, 150, 1)
        repeat = run_cell("SR", {"recovery": "selective-repeat"}, condition, PATH, 150, 1)
        assert adaptive.median <= repeat.median
        assert adaptive.zeros <= 0.01
        assert (adaptive.parities < 0.001) == (p < 0.01)


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({}, "recovery None: must be one of selective-repeat, uniform"),
        ({"recovery": "fountain"}, "recovery fountain: must be one of"),
        ({"recovery": "uniform", "block": 100, "party": 10}, "not settings of uniform"),
        ({"recovery": "uniform", "block": 10, "parity": 11}, "needs 1 <= C <= B"),
        ({"recovery": "smart", "fraction": 2}, "fraction 2: must be in"),
        ({"recovery": "tolerant", "bound": 1.0}, "bound 1.0: must be in"),
    ],
)
def test_bad_schemes(given, error):
    with pytest.raises(UsageError, match=error):
        make_scheme("mine", given, 2.0)


STUDY = """
title: Small
megabytes: [0.1, 0.4]
rates: [0, 0.05]
timeouts: [2, 4]
bursts: [null, 4]
flows: 200
schemes:
  SR: {recovery: selective-repeat}
  SMART: {recovery: smart}
ours: SMART
paper: {SR: 91.7}
"""


def test_the_command(tmp_path):
    (tmp_path / "study.yaml").write_text(STUDY)
    out = tmp_path / "out"
    done = run_program("benchmarks.fct", str(tmp_path / "study.yaml"), "--out", str(out), "--jobs", "1")
    assert done.returncode == 0, done.stderr
    assert "P99 of SMART is below that of SR by up to" in done.stdout
    assert "RTO 4 round trips, bursts of 4" in done.stdout
    assert {file.name for file in out.iterdir()} == {"fct.md", "fct.csv", "times.png", "gains.png"}
    rows = list(csv.DictReader((out / "fct.csv").open()))
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    for row in rows:
        assert float(row["mean_low"]) <= float(row["mean"]) <= float(row["mean_high"])
        if row["rate"] == "0":
            assert float(row["p99"]) == float(row["mean"])
    again = run_program("benchmarks.fct", str(tmp_path / "study.yaml"), "--out", str(out))
    assert again.returncode == 2 and "holds results already" in again.stderr


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "fct").glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_studies(file):
    settings = read(str(file), {})
    assert settings.paper and set(settings.paper) <= set(settings.schemes) and len(settings.conditions) > 50


#: Results of ns-3 for the same losses (docs/fct.md).
ROWS = list(csv.DictReader((ROOT / "benchmarks/results/fct_ns3_2026-11-22.csv").open()))
SCHEMES = {
    "SR": {"recovery": "selective-repeat"},
    "LoWAR (100,10)": {"recovery": "uniform", "block": 100, "parity": 10},
    "SMART gradients (100,50)": {"recovery": "smart", "block": 100, "parity": 50},
    "SMART gradients (100,10), 10 % high": {"recovery": "smart", "block": 100, "parity": 10, "fraction": 0.1},
    "SMART activations (100,10)": {"recovery": "tolerant", "block": 100, "parity": 10},
}


@pytest.mark.shows("completion times against ns-3, message by message", device=False)
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
        flows = [model.flow(PATH, int(row["packets"]), lost) for lost in losses]
        times = np.array([flow.time for flow in flows])
        assert (times.mean(), np.percentile(times, 99)) == pytest.approx((row["ns3_mean"], row["ns3_p99"]), rel=1e-3)
        assert sum(flow.again for flow in flows) == row["ns3_again"], row
        assert sum(flow.zeros for flow in flows) == row["ns3_zeros"], row
