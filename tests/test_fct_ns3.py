"""The model of completion times against what ns-3 gave for the same losses, message by message (scripts/fct_ns3.py)."""

import datetime
import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_lossy.errors import UsageError
from scripts import fct_ns3

pytestmark = pytest.mark.shows("completion times against ns-3, message by message", device=False)

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
