"""Reports from what Megatron-LM itself logs. That its real logs read so: ``test_plugin_megatron_lm.py``."""

import math

import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.report import loss_table, read_runs
from megatron_lossy.lab.report.read import read_megatron_run

pytestmark = pytest.mark.shows("reports from logs of Megatron-LM", device=False)


def _arguments(**settings) -> str:
    settings = {"num_layers": 2, "seed": 1234, "world_size": 4, "rank": 0, **settings}
    lines = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in settings.items()]
    return "\n".join(["--- arguments ---", *lines, "--- end of arguments ---"]) + "\n"


def _train(iteration: int, loss: float | None, skipped: int = 0, time: str = "10:00:00", prefix: str = "") -> str:
    value = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f"{prefix} [2026-11-21 {time}.123456] iteration {iteration:8d}/     100 | consumed samples:          160 | "
        f"elapsed time per iteration (ms): 12.3 | learning rate: 1.000000E-03 | global batch size:    16 |{value}"
        f" loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations: {skipped:3d} |"
        " number of nan iterations:   0 |\n"
    )


def _valid(iteration: int, loss: float, owner: float | None = None, which: str = "") -> str:
    text = f" validation loss at iteration {iteration}{which} | lm loss value: {loss:.6E} | lm loss PPL: 1.0E+00 | "
    if owner is not None:
        text += f"lm loss (owner weights) value: {owner:.6E} | lm loss (owner weights) PPL: 1.0E+00 | "
    return f"{'-' * 40}\n{text}\n{'-' * 40}\n"


def _write(path, *parts: str):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(parts))
    return path


LOSSY = {"p_grad": 0.1, "p_param": 0.1, "loss_model": "['bernoulli']", "loss_seed": 7}


def test_a_log_is_a_run(tmp_path):
    log = [_arguments(**LOSSY), _train(10, 3.0), _train(20, 2.0), _valid(20, 2.5, owner=2.25)]
    test_set = _valid(20, 9.0, which=" on test set")
    end = _valid(20, 2.5, which=" on validation set")
    _write(
        tmp_path / "a" / "run.log", *log, end, test_set, " [2026-11-21 10:00:09] iteration       30/     100 | cut off"
    )
    run = read_megatron_run(tmp_path / "a")
    assert (run.name, run.p_grad, run.p_param, run.loss_seed, run.seed) == ("a", 0.1, 0.1, 7, 1234)
    assert run.train == {10: 3.0, 20: 2.0} and run.iterations == 20
    assert run.valid == {"replica": {20: 2.5}, "owner": {20: 2.25}}
    assert run.label == "10 %" and run.config["num_layers"] == 2 and "rank" not in run.config


def test_logs_per_rank_requeued_out_of_order(tmp_path):
    """Rank 0 prints the arguments, the last rank the losses; the second job's files sort before the first's."""
    first, second = tmp_path / "9", tmp_path / "10"
    _write(first / "rank_0.out", _arguments(**LOSSY))
    _write(first / "rank_3.out", _train(10, 3.0, prefix="3: "), _train(20, 2.0, prefix="3: "), _valid(20, 2.5))
    _write(second / "rank_0.out", _arguments(**LOSSY))
    _write(second / "rank_3.out", _train(20, 2.125, time="11:00:00"), _train(30, 1.5, time="11:00:09"))
    run = read_megatron_run(tmp_path)
    assert run.train == {10: 3.0, 20: 2.125, 30: 1.5}
    assert run.valid == {"replica": {}}  # evaluated at 20, but that was trained again
    _write(second / "rank_0.out", _arguments(**{**LOSSY, "p_grad": 0.2}))
    with pytest.raises(UsageError, match="describes another run"):
        read_megatron_run(tmp_path)


def test_skipped_and_diverged_iterations(tmp_path):
    lines = [_train(10, None, skipped=10), _train(20, 3.0, skipped=9), _train(30, math.nan)]
    _write(tmp_path / "run.log", _arguments(), *lines)
    run = read_megatron_run(tmp_path)
    assert list(run.train) == [20, 30] and run.diverged and run.lossless


def test_a_log_without_arguments_is_refused(tmp_path):
    _write(tmp_path / "a" / "run.log", _train(10, 3.0))
    with pytest.raises(UsageError, match="no log there has Megatron's arguments"):
        read_runs(tmp_path)
    _write(tmp_path / "a" / "run.log", "nothing of interest\n")
    with pytest.raises(UsageError, match="holds no run"):
        read_runs(tmp_path)


def test_one_table_of_all_kinds(tmp_path):
    """A plain Megatron run without our flags is the baseline of a lossy one."""
    _write(tmp_path / "plain" / "slurm-1.out", _arguments(), _train(10, 2.0), _valid(10, 2.0))
    _write(tmp_path / "lossy" / "slurm-2.out", _arguments(**LOSSY), _train(10, 2.5))
    runs = read_runs(tmp_path)
    assert [run.name for run in runs] == ["plain", "lossy"]
    table = loss_table(runs)
    assert table.headings == ("0 %", "10 %")
    assert dict(table.rows)["train loss"][1].change == pytest.approx(25)
