"""The model of completion times against ns-3, message by message."""

import csv
from pathlib import Path

import numpy as np
import pytest

from benchmarks import run_wan, udp_exchange, udp_priority, udp_soak
from benchmarks.fct.__main__ import make_scheme
from benchmarks.fct.schemes import Losses
from benchmarks.fct.schemes import Path as Way

pytestmark = pytest.mark.shows(
    "completion times against ns-3, message by message",
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
        flows = [model.flow(Way(), int(row["packets"]), lost) for lost in losses]
        times = np.array([flow.time for flow in flows])
        assert (times.mean(), np.percentile(times, 99)) == pytest.approx((row["ns3_mean"], row["ns3_p99"]), rel=1e-3)
        assert sum(flow.again for flow in flows) == row["ns3_again"], row
        assert sum(flow.zeros for flow in flows) == row["ns3_zeros"], row


@pytest.mark.parametrize("program", [udp_priority.main, udp_soak.main, udp_exchange.main, run_wan.main])
def test_without_root_one_line(program, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert program(["--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "skipped: a lab needs root, for network namespaces\n"
