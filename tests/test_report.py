"""The table and the figure, from metrics files."""

import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.grad_errors import ErrorFlags
from megatron_lossy.lab.report import loss_table, read_runs
from megatron_lossy.lab.report.curves import running_mean
from megatron_lossy.lab.report.read import read_megatron_run
from megatron_lossy.lab.report.scalars import AXES, file_name, with_predictions
from megatron_lossy.lab.report.table import ONE_SEED, ScalarEntry
from megatron_lossy.lab.train.metrics import perplexity
from megatron_lossy.mechanisms.replicas.flags import ReplicaFlags

pytestmark = pytest.mark.shows(
    "tables and figures of runs, several seeds", "reports from logs of Megatron-LM", device=False
)


def write_run(folder, p, losses, valid=None, seed=1, p_param=None, tail="", **config):
    """A metrics file: training losses from iteration 1, and validation losses by weights at the last iteration."""
    folder.mkdir(parents=True)
    records = [
        {"kind": "run", "name": folder.name, "p_grad": p, "p_param": p if p_param is None else p_param}
        | {"loss_seed": seed, "seed": 1, "config": {"hidden_size": 8, **config}}
    ]
    records += [{"kind": "train", "iteration": k + 1, "lm loss": loss} for k, loss in enumerate(losses)]
    for weights, loss in (valid or {}).items():
        records.append({"kind": "valid", "iteration": len(losses), "lm loss": loss, "weights": weights})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def add(folder, **record):
    """Add a record of training."""
    with open(folder / "metrics.jsonl", "a") as file:
        named = {name.replace("_", " "): value for name, value in record.items()}
        file.write(json.dumps({"kind": "train", **named}) + "\n")


def cells(table):
    return {(name, heading): cell for name, row in table.rows for heading, cell in zip(table.headings, row)}


def write_scalars(folder, p, iterations=100, **scalars):
    """A metrics file whose training records also have ``scalars``: functions of the iteration, or values."""
    write_run(folder, p, [])
    for i in range(1, iterations + 1):
        values = {name: value(i) if callable(value) else value for name, value in scalars.items()}
        add(folder, iteration=i, lm_loss=2.0, **{name: value for name, value in values.items() if value is not ...})


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


def test_a_run_or_a_folder_of_runs(tmp_path):
    write_run(tmp_path / "a", 0.1, [2.0] * 20)
    (tmp_path / "a" / "iter_0000020").mkdir()
    assert [run.name for run in read_runs(tmp_path / "a")] == [run.name for run in read_runs(tmp_path)] == ["a"]


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


def test_what_a_resumed_run_left_behind_is_dropped(tmp_path):
    write_run(tmp_path / "a", 0.0, [9.0] * 30, {"replica": 8.0})
    add(tmp_path / "a", iteration=11, lm_loss=1.0)
    [run] = read_runs(tmp_path)
    assert (run.iterations, len(run.train), run.valid_loss("replica")) == (11, 11, None)


def test_skipped_iterations_do_not_count(tmp_path):
    write_run(tmp_path / "a", 0.0, [])
    for iteration, loss, skipped in ((10, 0.0, 10), (20, 0.0, 10), (30, 2.0, 9), (40, 0.0, 10)):
        add(tmp_path / "a", iteration=iteration, lm_loss=loss, skipped=skipped)
    [run] = read_runs(tmp_path)
    assert run.train == {30: 2.0} and run.iterations == 40


def test_a_run_that_diverged_has_no_validation_loss(tmp_path):
    write_run(tmp_path / "a", 0.3, [2.0] * 20, {"replica": 2.0})
    add(tmp_path / "a", iteration=21, lm_loss=None)
    write_run(tmp_path / "b", 0.1, [math.nan] * 5)
    found = cells(loss_table(read_runs(tmp_path)))
    for rate in ("30 %", "10 %"):  # after an evaluation, and before any
        assert str(found["val loss", rate]) == str(found["train loss", rate]) == "diverged"


def test_islands_of_a_run_are_one_run(tmp_path):
    """Their training losses are averaged; the validation is that of the mean already."""
    islands = {"islands": 2, "sync_method": "parameters", "p_sync": 0.2}
    for island, loss in enumerate((2.0, 4.0)):
        write_run(tmp_path / "run" / f"island_{island}", 0.0, [loss] * 20, {"consensus": 2.5}, **islands)
    write_run(tmp_path / "other", 0.0, [1.0] * 20)
    for runs in (read_runs(tmp_path), read_runs(tmp_path / "run")):
        [run] = [run for run in runs if "islands" in run.config]
        assert run.name == "run" and run.train_loss == 3.0 and run.valid_loss("consensus") == 2.5
    found = cells(loss_table(read_runs(tmp_path)))
    assert str(found["train loss", "0 %, islands 2, p-sync 0.2, sync-method parameters"]).startswith("3.000")
    assert str(found["train loss", "0 %"]) == "1.000"


def test_notes_say_what_the_reader_must_know(tmp_path):
    write_run(tmp_path / "a", 0.1, [2.0] * 20)
    notes = "\n".join(loss_table(read_runs(tmp_path)).notes)
    assert "no run without loss" in notes and ONE_SEED in notes and "not trained" not in notes
    write_run(tmp_path / "b", 0.0, [2.0] * 30, hidden_size=16, save="there")
    write_run(tmp_path / "c", 0.1, [2.2] * 20, seed=2)
    notes = "\n".join(loss_table(read_runs(tmp_path)).notes)
    assert ONE_SEED not in notes and "mean ± standard error over runs (10 %: 2)" in notes
    assert "not trained to iteration 30: a (last 20), c (last 20)" in notes
    assert "differ in more than the loss: hidden-size" in notes and "save" not in notes


def test_runs_of_other_settings_are_not_repetitions(tmp_path):
    for seed in (1, 2):
        write_run(tmp_path / f"base{seed}", 0.0, [2.0] * 20, seed=seed, grad_recovery="zero" if seed == 2 else "")
    for rule in ("zero", "renormalize"):
        write_run(tmp_path / rule, 0.2, [2.5] * 20, grad_recovery=rule, save=rule)
    table = loss_table(read_runs(tmp_path))
    assert table.headings == ("0 %", "20 %, grad-recovery renormalize", "20 %, grad-recovery zero")
    assert any("0 %: 2 runs with 1 different seeds" in note for note in table.notes)
    assert [cell.change for cell in table.rows[0][1]] == [None, pytest.approx(25), pytest.approx(25)]


def test_what_decides_about_the_losses_of_a_network_names_columns(tmp_path):
    write_run(tmp_path / "a", 0.0, [2.0] * 10, transport="udp", udp_rate=["1gbit"], udp_port=0, udp_fec=["auto"])
    write_run(tmp_path / "b", 0.0, [2.1] * 10, transport="udp", udp_rate=["10mbit"], udp_port=0, udp_fec=["auto"])
    write_run(tmp_path / "c", 0.0, [2.2] * 10, transport="udp", udp_rate=["10mbit"], udp_port=9, udp_fec=["auto"])
    assert loss_table(read_runs(tmp_path)).headings == ("udp, udp-rate 1gbit", "udp, udp-rate 10mbit")


def test_rates_of_other_models_are_no_baseline(tmp_path):
    write_run(tmp_path / "a", 0.0, [2.0] * 20, loss_model=["trace"])
    write_run(tmp_path / "b", 0.0, [2.0] * 20, loss_schedule=["0:0,10:0.2"])
    write_run(tmp_path / "c", 0.0, [2.0] * 20, loss_model=["gilbert-elliott:0.1,0.5,0,1", "bernoulli"])
    table = loss_table(read_runs(tmp_path))
    assert set(table.headings) == {"trace", "0:0,10:0.2", "g GE 0.1 0.5 0 1 / p 0 %"}
    assert any("no run without loss" in note for note in table.notes)


def test_runs_with_errors_are_no_baseline_and_are_named_by_their_flags(tmp_path):
    def write(name, loss, **flags):
        config = LossyConfig(**flags)
        fields = [*ErrorFlags.__dataclass_fields__, *ReplicaFlags.__dataclass_fields__]
        write_run(tmp_path / name, 0.0, [loss] * 20, **{field: getattr(config, field) for field in fields})

    noise = {"grad_error": "gaussian:1rms", "grad_error_ranks": (0, 2)}
    write("a", 2.0)
    write("b", 2.5, **noise)
    write("c", 2.2, **noise, param_sync_interval=10)
    # Replicas that are equal and only watched stay what they are; so does what an error of rate 0 hits.
    write("d", 2.0, param_sync_interval=10, replica_check="repair")
    write("e", 2.0, **noise | {"grad_error_rate": 0.0})
    write("f", 2.1, param_sync_interval=10, param_sync_state="params:always")
    runs = {run.name: run for run in read_runs(tmp_path)}
    assert [name for name, run in runs.items() if run.clean] == ["a", "d", "e"]
    table = loss_table([runs[name] for name in "abc"])
    error = "0 %, grad-error gaussian:1rms, grad-error-ranks [0, 2]"
    assert table.headings == ("0 %", f"{error}, param-sync-interval 0", f"{error}, param-sync-interval 10")
    assert [cell.change for cell in table.rows[0][1]] == [None, pytest.approx(25), pytest.approx(10)]
    # All these flags are named even if no other run has them.
    assert loss_table([runs["c"]]).headings == (f"{error}, param-sync-interval 10",)
    assert loss_table([runs["f"]]).headings == ("0 %, param-sync-interval 10, param-sync-state params:always",)
    assert loss_table([runs["a"], runs["d"]]).headings == ("0 %",)


@given(st.floats(0, 100))
def test_perplexity_is_cut_as_megatron_does(loss):
    assert perplexity(loss) == math.exp(min(20, loss))
    assert perplexity(None) is None and math.isnan(perplexity(math.nan))


@given(st.lists(st.one_of(st.floats(1, 9), st.just(math.nan)), max_size=300))
def test_the_running_mean_stays_between_its_values(losses):
    values = np.array(losses)
    smooth = running_mean(values)
    assert (np.isnan(smooth) == np.isnan(values)).all()
    if np.isfinite(values).any():
        assert np.nanmin(smooth) >= np.nanmin(values) - 1e-9 and np.nanmax(smooth) <= np.nanmax(values) + 1e-9


def test_the_running_mean_does_not_shift_a_line():
    line = np.arange(400.0)
    assert running_mean(line)[:390] == pytest.approx(line[:390])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.4]), min_size=1, max_size=5), st.floats(0.01, 30))
def test_every_table_is_whole(rates, loss):
    with tempfile.TemporaryDirectory() as folder:
        for i, rate in enumerate(rates):
            write_run(Path(folder) / str(i), rate, [loss + i] * 12, {"replica": loss}, seed=i)
        table = loss_table(read_runs(folder))
    assert len(table.headings) == len(set(rates))
    lines = table.text().splitlines()[:6]
    # Columns begin where the rule under the headings says.
    for heading in table.headings:
        start = lines[0].index(heading)
        assert lines[1][start] == "-" and all(line[start - 1] == " " and line[start] != " " for line in lines)
    assert all(line.count("|") == len(set(rates)) + 2 for line in table.markdown().splitlines()[:6])
    assert len(table.csv().splitlines()) == 1 + 4 * len(set(rates))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", 'line 4: must be a record with a "kind"'),
        ('{"kind": "train", "iteration": 5}', "line 4: holds no 'lm loss'"),
        ('{"kind": "train", "iteration": "5", "lm loss": 1}', "line 4: holds a wrong value"),
        ('{"kind": "run", "p_grad": 0.5, "p_param": 0.5}', "line 4: describes another run"),
    ],
)
def test_wrong_records_are_named(tmp_path, line, message):
    write_run(tmp_path / "a", 0.0, [2.0, 2.0], tail=line + "\n")
    with pytest.raises(UsageError, match=message):
        read_runs(tmp_path)


def test_all_numbers_of_training_records_are_kept(tmp_path):
    measured = lambda i: 0.5 * i if i % 10 == 0 else ...
    norm = lambda i: None if i == 3 else i
    write_scalars(tmp_path / "a", 0.1, 30, grad_norm=norm, drift_owner=measured, host="b", on=True)
    [run] = read_runs(tmp_path)
    assert run.scalars.keys() == {"grad norm", "drift owner"}
    assert run.recorded("drift owner") == {10: 5.0, 20: 10.0, 30: 15.0}
    assert run.recorded("lm loss") == run.train and run.recorded("none") == {}
    norms = run.recorded("grad norm")
    assert math.isnan(norms.pop(3)) and norms == {i: i for i in range(1, 31) if i != 3}
    # Resumed from iteration 14.
    add(tmp_path / "a", iteration=15, lm_loss=1.0, grad_norm=7)
    [run] = read_runs(tmp_path)
    assert list(run.recorded("drift owner")) == [10] and max(run.recorded("grad norm")) == 15
    assert run.recorded("grad norm")[15] == 7


def test_a_scalar_is_that_of_the_end_of_a_run(tmp_path):
    norms = lambda i: None if i == 195 else float(i)
    early = lambda i: 3.0 * i if i <= 20 else ...
    ages = lambda i: i % 7
    write_scalars(tmp_path / "a", 0.1, 200, grad_norm=norms, early=early, age_max=ages, age_min=ages, all_null=None)
    [run] = read_runs(tmp_path)
    assert run.scalar("grad norm") == pytest.approx(np.mean([i for i in range(181, 201) if i != 195]))
    assert (run.scalar("early"), run.scalar("age max"), run.scalar("age min")) == (60, 6, 0)
    assert run.scalar("grad norm (run)") == pytest.approx(np.median([i for i in range(1, 201) if i != 195]))
    assert run.scalar("age max (run)") == 3 and run.scalar("none (run)") is None
    assert run.scalar("lm loss") == run.train_loss and run.scalar("none") is None and math.isnan(run.scalar("all null"))
    add(tmp_path / "a", iteration=201, lm_loss=None, grad_norm=1)
    assert math.isnan(read_runs(tmp_path)[0].scalar("grad norm"))


def test_scalars_of_skipped_iterations_count(tmp_path):
    write_scalars(tmp_path / "a", 0.1, 20, skipped=1, loss_rate_grad=0.25)
    [run] = read_runs(tmp_path)
    assert run.train == {} and run.scalar("loss rate grad") == 0.25


@given(st.floats(1e-12, 1e12), st.floats(1e-12, 1e12))
def test_entries_of_scalars_show_four_digits_of_any_magnitude(mean, error):
    text, _, of_error = str(ScalarEntry(mean, error, None, 2)).partition(" ± ")
    assert float(text) == pytest.approx(mean, rel=6e-4) and float(of_error) == pytest.approx(error, rel=0.06)
    assert len(text) <= 9


def test_entries_of_scalars():
    entries = [str(ScalarEntry(mean, None, None, 1)) for mean in (0.0, 13.0, 1.3e-8, 1234.5)]
    assert entries == ["0", "13", "1.300e-08", "1234"]
    assert str(ScalarEntry(math.nan, None, None, 2, 1)) == "diverged in 1 of 2 runs"
    assert str(ScalarEntry(math.nan, None, None, 0)) == "-"


def test_predictions_belong_to_what_they_predict():
    names = ["drift owner predicted", "grad norm", "drift owner", "drift pairs predicted"]
    groups = [("grad norm",), ("drift owner", "drift owner predicted"), ("drift pairs predicted",)]
    assert with_predictions(names) == groups
    assert [file_name(group[0]) for group in groups] == ["grad_norm", "drift_owner", "drift_pairs_predicted"]
    assert file_name("elapsed time per iteration (ms)") == "elapsed_time_per_iteration_ms"
    for name in AXES:
        if f"{name} predicted" in AXES:
            assert AXES[f"{name} predicted"] == AXES[name]


# --- logs of Megatron-LM ----------------------------------------------------------------------------------------------


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
