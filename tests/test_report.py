"""The table and the figure, from metrics files."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.errors import UsageError
from megatron_lossy.report import loss_table, plot_curves, read_runs
from megatron_lossy.report.__main__ import run as report


def write_run(folder, p, losses, valid=None, seed=1, p_param=None, tail=""):
    """A metrics file: training losses from iteration 1, and validation losses by weights at the last iteration."""
    folder.mkdir(parents=True)
    records = [
        {"kind": "run", "name": folder.name, "p_grad": p, "p_param": p if p_param is None else p_param}
        | {"loss_seed": seed, "seed": 1, "config": {"hidden_size": 8}}
    ]
    records += [{"kind": "train", "iteration": k + 1, "lm loss": loss} for k, loss in enumerate(losses)]
    for weights, loss in (valid or {}).items():
        records.append({"kind": "valid", "iteration": len(losses), "lm loss": loss, "weights": weights})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def cells(table):
    return {(name, heading): cell for name, row in table.rows for heading, cell in zip(table.headings, row)}


def test_table_of_one_seed(tmp_path):
    write_run(tmp_path / "a", 0.0, [5.0] * 90 + [2.0] * 10, {"replica": 2.5})
    write_run(tmp_path / "b", 0.1, [5.0] * 90 + [2.1] * 10, {"replica": 2.6}, tail='{"kind": "tr')
    table = loss_table(read_runs(tmp_path))
    found = cells(table)
    assert table.headings == ("0 %", "10 %")
    assert found["train loss", "0 %"].mean == pytest.approx(2.0)
    assert found["train loss", "10 %"].change == pytest.approx(5.0)
    assert found["val PPL", "10 %"].mean == pytest.approx(math.exp(2.6))
    assert found["val PPL", "10 %"].change == pytest.approx(100 * math.expm1(0.1))
    assert "one loss seed" in table.text() and "no ordering is claimed" in table.markdown()
    assert table.csv().startswith("metric,")


@settings(deadline=None, max_examples=20)
@given(st.lists(st.floats(1.0, 3.0), min_size=2, max_size=5))
def test_several_seeds_have_standard_errors(losses):

    with tempfile.TemporaryDirectory() as folder:
        for seed, loss in enumerate(losses):
            write_run(Path(folder) / f"s{seed}", 0.2, [loss] * 20, seed=seed)
        [cell] = [cell for name, (cell,) in loss_table(read_runs(folder)).rows if name == "train loss"]
    assert cell.runs == len(losses) and cell.change is None  # no lossless run to compare with
    assert cell.mean == pytest.approx(np.mean(losses))
    assert cell.error == pytest.approx(np.std(losses, ddof=1) / math.sqrt(len(losses)), abs=1e-9)


def test_owner_and_replica_diverged_and_mixed_rates(tmp_path):
    write_run(tmp_path / "a", 0.0, [2.0] * 20, {"replica": 2.0, "owner": 1.9})
    write_run(tmp_path / "b", 0.4, [float("nan")] * 20, {"replica": float("nan"), "owner": 2.0})
    write_run(tmp_path / "c", 0.1, [2.0] * 20, p_param=0.0)
    table = loss_table(read_runs(tmp_path))
    found = cells(table)
    assert str(found["train loss", "40 %"]) == "diverged"
    assert found["val loss (owner)", "0 %"].mean == 1.9
    assert any("10 %" in heading and "0 %" in heading and heading.startswith("g") for heading in table.headings)


def test_a_resumed_run_counts_an_iteration_once(tmp_path):
    write_run(tmp_path / "a", 0.0, [9.0] * 20)
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        for iteration in range(11, 21):
            file.write(json.dumps({"kind": "train", "iteration": iteration, "lm loss": 1.0}) + "\n")
    assert read_runs(tmp_path)[0].train_loss == pytest.approx(1.0)


def test_wrong_input_names_file_and_line(tmp_path):
    with pytest.raises(UsageError, match="holds no run"):
        read_runs(tmp_path)
    write_run(tmp_path / "a", 0.0, [2.0], tail="nonsense\n{}\n")
    with pytest.raises(UsageError, match="metrics.jsonl line 3"):
        read_runs(tmp_path)


def test_files_are_written(tmp_path, capsys):
    for p in (0.0, 0.2):
        write_run(tmp_path / f"p{p}", p, [5 - 0.02 * k * (1 - p) for k in range(100)], {"replica": 3.5})
    report([str(tmp_path)])
    assert "train loss" in capsys.readouterr().out
    picture = (tmp_path / "training_curves.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    assert "| train loss |" in (tmp_path / "loss_table.md").read_text()
    plot_curves(read_runs(tmp_path), tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 20_000
    assert not list(tmp_path.glob("*tmp*"))
