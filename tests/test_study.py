"""Studies: what a file means, cells that run once, and the statistics against plain NumPy."""

import json
import math
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import yaml

from megatron_lossy.base.errors import UsageError
from megatron_lossy.lab.report import Run
from megatron_lossy.lab.report.scalars import AXES
from megatron_lossy.lab.studies import cells, commands
from megatron_lossy.lab.studies.cells import CellFolder, run_cells
from megatron_lossy.lab.studies.design import Design, loss_seed_of, read_design
from megatron_lossy.lab.studies.figures import plot_comparison
from megatron_lossy.lab.studies.folder import (
    RECORD,
    check_out,
    read_record,
    results_of,
    tables,
    write_figures,
    write_record,
)
from megatron_lossy.lab.studies.summary import (
    Difference,
    Results,
    against_best,
    comparison,
    differences,
    loss_metrics,
    run_table,
)
from megatron_lossy.lab.studies.tables import (
    PAPER_CHANGES,
    PAPER_TABLE_1,
    scalar_tables,
    share_won_back,
    table_1,
    won_back,
)
from tests.programs import ROOT, Program, until

pytestmark = [
    pytest.mark.shows("studies: cells run once, are shared, interrupted, killed, or fail"),
    pytest.mark.shows("statistics of studies against plain NumPy", device=False),
]

TINY = {"num-layers": 1, "hidden-size": 32, "num-attention-heads": 2, "seq-length": 16, "virtual-workers": 2}
TINY |= {"micro-batch-size": 1, "global-batch-size": 2, "train-iters": 8, "lr": 1e-3, "data": "stdlib"}
TINY |= {"eval-interval": 4, "eval-iters": 1, "log-interval": 1}

NOISE = {"grad-error": "gaussian:1rms"}


def _design(**changes) -> Design:
    levels = {"10 %": {"p": 0.1}}
    return Design(
        **{"title": "T", "settings": TINY, "seeds": [1, 2], "loss_seeds": [1, 2], "levels": levels, **changes}
    )


def _run(loss: float, **valid: float) -> Run:
    """Return a run of 20 iterations that ends with these losses."""
    return Run("r", 0.0, 0.0, 1, 1, {}, {20: loss}, {weights: {20: value} for weights, value in valid.items()}, 20)


def _results_of(study, loss) -> Results:
    """Return runs with the ``loss`` of each trial; no run where it is ``None``."""
    found = {trial.cell.name: loss(trial) for trial in study.trials}
    return Results(study, {name: _run(value) for name, value in found.items() if value is not None})


SHIPPED = [
    (file, name)
    for file in sorted((ROOT / "configs/studies").glob("*.yaml"))
    for name in yaml.safe_load(file.read_text()).get("studies", [None])
]


@pytest.mark.parametrize(("file", "name"), SHIPPED, ids=[name or file.stem for file, name in SHIPPED])
@pytest.mark.slow
def test_shipped_studies(file, name):
    study = read_design(file, name).study()
    assert study.question.endswith("?")
    assert len(study.trials) >= len(study.variants) * (len(study.levels) + 1) * 2


def test_a_file_of_several_studies(tmp_path):
    file = tmp_path / "several.yaml"
    levels = {"20 %": {"p": 0.2}}
    studies = {"a": {"title": "A", "levels": levels}, "b": {"title": "B", "seeds": [2, 3], "levels": levels}}
    file.write_text(json.dumps({"seeds": [1], "settings": TINY, "studies": studies}))  # JSON is YAML
    a, b = (read_design(file, name) for name in "ab")
    assert (a.title, a.seeds, b.title, b.seeds) == ("A", [1], "B", [2, 3])
    assert commands._read_study([str(file), "b", "--jobs", "1"])[2] == "b"
    for content, name, message in (
        (file.read_text(), None, "holds several studies; name one of a, b"),
        (file.read_text(), "c", "holds no study 'c'; name one of a, b"),
        ("studies: [a]", "a", "studies: must be a mapping from names to studies"),
        ("title: T", "a", "holds one study, and none that is called 'a'"),
    ):
        file.write_text(content)
        with pytest.raises(UsageError, match=message):
            read_design(file, name)


def test_trials_are_paired_over_seeds():
    study = _design().study()
    assert [(t.level, t.seed, t.loss_seed) for t in study.trials] == [
        (None, 1, None),
        ("10 %", 1, 1),
        ("10 %", 1, 2),
        (None, 2, None),
        ("10 %", 2, 1),
        ("10 %", 2, 2),
    ]
    for trial in study.trials:
        assert trial.cell.train.seed == trial.seed
        if trial.level:
            assert (trial.cell.loss.p_grad, trial.cell.loss.p_param) == (0.1, 0.1)
            assert trial.cell.loss.loss_seed == loss_seed_of(trial.seed, trial.loss_seed)
        else:
            assert trial.cell.loss.lossless
    # Peculiarities of some losses must not repeat in every seed.
    assert len({trial.cell.loss.loss_seed for trial in study.trials if trial.level}) == 4


def test_a_baseline_is_what_changes_refer_to():
    averaged = {"islands": 2, "sync-method": "parameters"}
    study = _design(
        levels={"all": averaged, "half": {**averaged, "sync-fraction": 0.5}, "lost": {**averaged, "p-sync": 0.1}},
        variants={"slow": {}, "fast": {"lr": 0.1}},
        baseline={"name": "gradients", "sync-method": "gradients", "islands": 1, "lr": 0.01},
        seeds=[1, 2],
    ).study()
    assert study.baseline == "gradients"
    reference = {(trial.variant, trial.seed): trial.cell for trial in study.trials if trial.level is None}
    assert all(cell.train.lr == 0.01 and cell.loss.lossless for cell in reference.values())
    assert reference["slow", 1] == reference["fast", 1] != reference["slow", 2]
    last = [trial for trial in study.trials if (trial.seed, trial.loss_seed) == (2, 2)]
    seeds = {trial.level: trial.cell.loss.loss_seed for trial in last}
    # Where nothing is drawn a seed of the losses would only make the same run twice.
    assert seeds == {"all": 1234, "half": 1234, "lost": 2002}
    without = _design(levels={"10 %": {"p-sync": 0.1}}, settings=TINY | averaged, seeds=[1]).study()
    [lossless] = {trial.cell for trial in without.trials if trial.level is None}
    assert lossless.loss.averages and not lossless.loss.draws()


FOUR = {**TINY, "num-layers": 2, "virtual-workers": 4, "global-batch-size": 4}
_ISLANDS = {"islands": 2, "sync-method": "parameters"}
_ASYNC = {"async-pipeline": True, "virtual-stages": 1}


@pytest.mark.parametrize(
    ("settings", "level", "kept"),
    [
        (_ISLANDS, {"loss-schedule": "0:0.1"}, {"islands": 2, "sync_method": "parameters"}),
        (_ISLANDS, {"transport": "pieces", "p-sync": 0.1}, {"islands": 2, "transport": "torch"}),
        (_ISLANDS, {"loss-model": "gilbert-elliott:0.1,0.5,0,1"}, {}),
        (_ISLANDS, {"p-sync": 0.1, "loss-unit": "packet", "sync-fraction": 0.5}, {"sync_fraction": 0.5}),
        (_ASYNC, {"loss-schedule": "0:0.1"}, {"async_pipeline": True, "virtual_stages": 1}),
        (_ASYNC, {"p-act": 0.1, "p-act-grad": 0.1, "virtual-boundaries": [1]}, {"async_pipeline": True, "p_act": 0}),
        (_ASYNC, {**NOISE, "grad-error-at": "reduce"}, {"async_pipeline": True, "grad_error": "none"}),
    ],
)
def test_islands_and_stages_are_clean_where_changes_refer_to(settings, level, kept):
    """A study whose own settings lose or err, for one."""
    study = _design(settings={**FOUR, **settings, **level}, levels={"a": {}}, seeds=[1]).study()
    [clean] = {trial.cell.loss for trial in study.trials if trial.level is None}
    assert not clean.draws() and not clean.errs and clean.transport == "torch"
    assert {name: getattr(clean, name) for name in kept} == kept


def test_per_link_rates_and_traces_are_not_where_changes_refer_to(tmp_path):
    np.savetxt(tmp_path / "rates.txt", 0.1 - 0.1 * np.eye(4))
    level = {"loss-model": [f"per-link:{tmp_path / 'rates.txt'}", *["bernoulli"] * 3]}
    study = _design(settings={**FOUR, **_ISLANDS}, levels={"a": level}, variants={"a": level}).study()
    clean = {trial.cell.loss for trial in study.trials if trial.level is None}
    assert {loss.loss_model for loss in clean} == {("bernoulli",)}


def test_variants_win_over_levels_and_share_lossless_cells():
    variants = {"both": {}, "gradients": {"p-param": 0}, "packets": {"loss-unit": "packet"}, "fast": {"lr": 0.1}}
    study = _design(variants=variants, seeds=[1], loss_seeds=[1]).study(["--weight-decay", "0.5"])
    lossy = {trial.variant: trial.cell for trial in study.trials if trial.level}
    assert lossy["gradients"].loss.p_grad == 0.1 and lossy["gradients"].loss.p_param == 0
    assert all(trial.cell.train.weight_decay == 0.5 for trial in study.trials)
    reference = {trial.variant: trial.cell.name for trial in study.trials if trial.level is None}
    assert reference["both"] == reference["gradients"] == reference["packets"] != reference["fast"]
    assert len(study.cells) == 4 + 2


def test_a_cell_is_known_by_the_losses_in_its_files(tmp_path):
    rates, trace, names = tmp_path / "rates.txt", tmp_path / "a.npz", set()
    for rate in (0.1, 0.2):
        np.savetxt(rates, rate - rate * np.eye(4))
        np.savez(trace, sequence=np.arange(40).reshape(1, 1, -1) % 5 > 10 * rate)
        for level in ({"loss-model": f"per-link:{rates}"}, {"loss-model": "trace", "trace": str(trace)}):
            study = _design(
                settings={**FOUR, "loss-unit": "packet"}, levels={"a": level}, seeds=[1], loss_seeds=[1]
            ).study()
            names |= {trial.cell.name for trial in study.trials if trial.level}
    assert len(names) == 4


def test_a_cell_is_known_by_what_matters():
    def name(*arguments, **changes):
        return _design(seeds=[1], loss_seeds=[1], **changes).study(arguments).trials[1].cell.name

    assert name() == name("--log-interval", "7") == name("--save-interval", "3") == name(title="U")
    names = [
        name(),
        name("--drift-interval", "5"),  # no weight is another, but a run without cannot stand for one that measured
        name("--sharpness-interval", "5"),
        name("--lr", "0.1"),
        name("--grad-recovery", "zero"),
        name(settings={**TINY, "seq-length": 8}),
    ]
    assert len(set(names)) == len(names)
    # A flag that is new, or whose default depends on another one, leaves the cells that are there what they are.
    settings = _design(seeds=[1], loss_seeds=[1]).study([]).trials[1].cell.settings
    assert {name for name in settings if name.startswith(("loss", "packet", "transport", "udp"))} == {"loss-seed"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: T", r"needs levels \(of loss or errors\), or variants to compare"),
        ("title: T\nlevels: {a: {p: 0.1}}\nlevel: 1", "unknown key level"),
        ("title: T\nlevels: {a: {p: 0.1}}\nvariants: {b: {}}\nagainst: {b: c}", "against: 'c': is no variant"),
        ("title: T\nlevels: {a: 3}", "levels, a: must be a mapping"),
        ("title: T\nlevels: {a: {p: 0.1}}\nseeds: [1, 1]", "seeds: 1 1: must differ"),
        ("title: T\nlevels: {a: {p: 0.1}}\nseeds: 3", "seeds: 3: must be a list"),
        ("title: T\nlevels: {a: {p: 0.1}}\nmetrics: grad norm", "metrics: grad norm: must be a list"),
        ("title: T\nlevels: {a: {p: 0.1}}\nmetrics: [grad nrm]", "metrics: 'grad nrm': is not recorded; must be"),
        ("title: T\nlevels: {a: {p: 0.1}}\nmetrics: [[grad norm]]", r"metrics: \['grad norm'\]: is not recorded"),
        ("title: T\nlevels: {a: {p: 0.1}}\nmetrics: [grad norm, grad norm]", "must differ"),
        (
            "title: T\nlevels: {a: {p: 0.1}}\nbaseline: {lr: 1.0}",
            "baseline: must be a mapping with a name, which no level",
        ),
        (
            "title: T\nlevels: {a: {p: 0.1}}\nbaseline: {name: a}",
            "baseline: must be a mapping with a name, which no level",
        ),
        ("title: [", "cannot be read"),
    ],
)
def test_wrong_study_files(tmp_path, text, message):
    file = tmp_path / "study.yaml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message) as error:
        read_design(file)
    assert str(file) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "variant", "message"),
    [
        ({"p": 0.1}, {}, "T, v, 0 %: --p-grad 0.1 --p-param 0.1: needs levels"),
        ({"loss-unit": "packet"}, {"p-grad": 0.1}, "--p-grad 0.1 --loss-unit packet: needs levels"),
        ({"islands": 2, "sync-method": "parameters"}, {"p-sync": 0.1}, "T, v, 0 %: --p-sync 0.1: needs levels"),
        ({"use-distributed-optimizer": False}, NOISE, "--grad-error gaussian:1rms: needs levels"),
        ({"use-distributed-optimizer": False, "param-sync-interval": 2}, {}, "--param-sync-interval 2: needs levels"),
    ],
)
def test_no_loss_is_dropped_without_a_word(settings, variant, message):
    with pytest.raises(UsageError, match=message):
        _design(settings=TINY | settings, variants={"v": variant}, levels={}).study()


@pytest.mark.parametrize(
    ("changes", "arguments", "message"),
    [
        ({"levels": {"a": {"p": 1.5}}}, [], "T, a: --p-grad 1.5: must be in"),
        ({"levels": {"a": {}}}, [], "T, a: loses nothing"),
        ({"levels": {"a": {"p_grd": 0.1}}}, [], "level a: unknown key p_grd, did you mean p-grad"),
        ({"variants": {"v": {"lr": -1}}}, [], "T, v, 0 %: --lr -1.0: must be"),
        ({"metrics": ["grad norm", "drift pairs"]}, [], "T, 10 %: metrics: 'drift pairs': .* with drift-interval only"),
        ({"metrics": ["lr x sharpness (run)"]}, [], "metrics: 'lr x sharpness .run.': .* with sharpness-interval only"),
        ({}, ["--save", "x"], "--save x: cannot be given to a study"),
        ({}, ["--virtual-workers", "3"], "--global-batch-size 2: must be divisible"),
    ],
)
def test_wrong_conditions(changes, arguments, message):
    with pytest.raises(UsageError, match=message):
        _design(**changes).study(arguments)


REPLICAS = {**TINY, "use-distributed-optimizer": False}


def test_levels_can_be_errors_in_gradients():
    variants = {"DDP": {}, "mean": {"param-sync-interval": 2}, "repair": {"replica-check": "repair"}}
    variants |= {"fast": {"lr": 0.1}}
    study = _design(settings=REPLICAS, levels={"R = 1": NOISE}, variants=variants, loss_seeds=[1]).study()
    assert study.errs and study.baseline == "no error" and not _design().study().errs
    clean = {trial.variant: trial.cell for trial in study.trials if trial.level is None and trial.seed == 1}
    # Measures against errors have no effect without errors.
    assert clean["DDP"] == clean["mean"] == clean["repair"] != clean["fast"]
    assert all(cell.loss.inert for cell in clean.values())
    erring = {trial.variant: trial.cell for trial in study.trials if trial.level and trial.seed == 2}
    assert {cell.loss.grad_error for cell in erring.values()} == {"gaussian:1rms"}
    assert {name: cell.loss.param_sync_interval for name, cell in erring.items()}["mean"] == 2
    assert {cell.loss.loss_seed for cell in erring.values()} == {loss_seed_of(2, 1)}
    assert len({cell.name for cell in erring.values()}) == 4
    assert all(cell.loss.save_replicas for cell in erring.values())  # or an interrupted one would not go on


def test_the_share_of_a_cost_that_is_won_back():
    """Against the textbook's standard error of a ratio of means."""
    random = np.random.default_rng(23)
    there = random.uniform(8, 12, 5)
    here = 0.3 * there + random.uniform(-0.5, 0.5, 5)
    share = share_won_back(dict(enumerate(there)), {**dict(enumerate(here)), 9: 1e9})
    ratio = here.mean() / there.mean()
    cov = np.cov(here, there, ddof=1)
    variance = (cov[0, 0] - 2 * ratio * cov[0, 1] + ratio**2 * cov[1, 1]) / there.mean() ** 2 / 5
    assert share.mean == pytest.approx(100 * (1 - ratio)) and share.runs == 5
    assert share.error == pytest.approx(100 * np.sqrt(variance))
    # Where nothing costs anything beyond its interval, and with one seed, there is nothing to win back.
    assert str(share_won_back({1: 5.0, 2: -4.0, 3: 1.0}, {1: 0.0, 2: 0.0, 3: 0.0})) == "-"
    assert str(share_won_back({1: 5.0}, {1: 0.0})) == "-"
    # A run that diverged is not free of cost.
    nan = np.nan
    assert str(share_won_back({1: 5.0, 2: 5.1}, {1: nan, 2: 0.0})) == "diverged"
    assert str(share_won_back({1: 5.0, 2: nan, 3: nan}, {1: 0.0, 2: 0.0, 3: 1.0})) == "cost diverged"
    assert str(share_won_back({1: nan, 2: 5.0}, {1: nan, 2: 0.0})) == "diverged"
    assert str(share_won_back({1: 5.0}, {1: nan})) == "diverged"
    assert share_won_back({1: 5.0, 2: nan, 3: nan}, {1: 0.0, 2: 0.0, 3: 1.0}).diverged == 2


def test_shares_are_of_the_variant_where_nothing_is_done():
    variants = {"DDP": {}, "mean": {"param-sync-interval": 2}, "fast, DDP": {"lr": 0.1}}
    variants["fast, mean"] = {"lr": 0.1, "param-sync-interval": 2}
    study = _design(settings=REPLICAS, levels={"R = 1": NOISE}, variants=variants, loss_seeds=[1]).study()
    values = {"DDP": 3.0, "mean": 2.25, "fast, DDP": 4.0, "fast, mean": 3.0}
    results = _results_of(study, lambda trial: values[trial.variant] if trial.level else 2.0)
    found = {name: entries[0].mean for name, entries in won_back(results, "train loss").rows}
    assert found == pytest.approx({"mean": 75, "fast, mean, of fast, DDP": 50})
    [note] = won_back(results, "train loss").notes
    assert "seeds; -: no cost beyond its 95 % interval; ±" in note
    one = {t.cell.name: results.runs[t.cell.name] for t in study.trials if t.seed == 1}
    [note] = won_back(Results(study, one), "train loss").notes
    assert "-: no cost beyond its 95 % interval, or fewer than two seeds;" in note
    for trial in study.trials:
        if (trial.variant, trial.level) == ("DDP", "R = 1"):
            one[trial.cell.name] = _run(np.nan)  # before an evaluation
        elif trial.cell.name in one:
            one[trial.cell.name].valid = {"replica": {20: 2.0}}
    table = won_back(Results(study, one), "val loss")
    assert str(dict(table.rows)["mean"][0]) == "cost diverged"
    assert "; cost diverged: where nothing is done a run did" in table.notes[0]
    table = comparison(results, "train loss")
    assert table.headings == ("no error", "R = 1")
    assert any("each with 1 seed of the errors" in note and "same seed without errors" in note for note in table.notes)
    assert won_back(_results({("", 1, 0): 2.0, ("10 %", 1, 1): 3.0}), "train loss") is None


def _results(losses: dict) -> Results:
    """Return runs whose losses are ``losses[level, seed, loss_seed]``; no run where there is none."""
    levels = {level: {"p": 0.1 * number} for number, level in enumerate(sorted({k[0] for k in losses} - {""}), 1)}
    study = _design(levels=levels, seeds=[1, 2, 3]).study()
    found = {t.cell.name: losses.get((t.level or "", t.seed, t.loss_seed or 0)) for t in study.trials}
    return Results(study, {name: _run(loss, replica=2 * loss) for name, loss in found.items() if loss is not None})


def test_means_errors_and_paired_changes():
    random = np.random.default_rng(7)
    reference, lossy = random.uniform(2, 3, 3), random.uniform(2, 4, (3, 2))
    losses = {("", seed, 0): reference[seed - 1] for seed in (1, 2, 3)}
    losses |= {("10 %", seed, k): lossy[seed - 1, k - 1] for seed in (1, 2, 3) for k in (1, 2)}
    table = table_1(_results(losses))
    rows = dict(table.rows)
    none, ten = rows["train loss"]
    assert none.mean == pytest.approx(np.mean(reference)) and none.change is None and none.runs == 3
    assert none.error == pytest.approx(np.std(reference, ddof=1) / np.sqrt(3))
    by_seed = lossy.mean(axis=1)
    change = 100 * (by_seed / reference - 1)
    assert (ten.mean, ten.runs) == (pytest.approx(np.mean(lossy)), 6)
    assert ten.error == pytest.approx(np.std(by_seed, ddof=1) / np.sqrt(3))
    assert ten.change == pytest.approx(np.mean(change))
    assert ten.change_error == pytest.approx(np.std(change, ddof=1) / np.sqrt(3))
    # Perplexities are those of runs, not of means.
    assert rows["val PPL"][0].mean == pytest.approx(np.mean(np.exp(2 * reference)))
    assert rows["val loss, paper"][1].mean == 2.378 and rows["val loss, paper"][1].change == 0.49


def test_differences_are_paired_by_seed():
    random = np.random.default_rng(11)
    reference, first, second = random.uniform(2, 3, 3), random.uniform(2, 4, 3), random.uniform(2, 4, 3)
    losses = {("", seed, 0): reference[seed - 1] for seed in (1, 2, 3)}
    losses |= {("10 %", seed, 1): first[seed - 1] for seed in (1, 2, 3)}
    losses |= {("20 %", seed, 1): second[seed - 1] for seed in (1, 2, 3)}
    results = _results(losses)
    tables = differences(results, "train loss")
    assert list(tables) == ["between_levels"] and tables["between_levels"].headings == ("20 %",)
    found = tables["between_levels"].rows[0][1][0]
    wanted = 100 * (second - first) / reference
    error = np.std(wanted, ddof=1) / np.sqrt(3)
    assert found.mean == pytest.approx(np.mean(wanted)) and found.error == pytest.approx(error)
    low, high = np.mean(wanted) - 4.303 * error, np.mean(wanted) + 4.303 * error
    assert str(found) == f"{np.mean(wanted):+.2f} ± {error:.2f} ({low:+.1f} to {high:+.1f})"
    lines = run_table(results).splitlines()
    assert lines[0] == "cell,variant,level,seed,loss seed,train loss,val loss" and len(lines) == 1 + 9
    assert lines[2].split(",")[2:6] == ["10 %", "1", "1001", str(first[0])]


def test_variants_with_runs_without_loss_of_their_own_are_compared_with_the_best():
    variants = {"slow": {"lr": 0.1}, "fast": {"lr": 0.2}}
    study = _design(variants=variants, loss_seeds=[1]).study()
    values = {("slow", None): (2.0, 2.2), ("fast", None): (1.9, 2.4), ("slow", "10 %"): (3.0, 3.3)}
    results = _results_of(study, lambda t: values.get((t.variant, t.level), (None, None))[t.seed - 1])
    rows = dict(against_best(results, "train loss").rows)
    # 'slow' has the lower mean, 2.1 against 2.15, although not in each seed.
    assert [entry.mean for entry in rows["slow"]] == pytest.approx([0, 50])
    wanted = 100 * np.array([1.9 / 2.0 - 1, 2.4 / 2.2 - 1])
    assert rows["fast"][0].mean == pytest.approx(np.mean(wanted))
    assert rows["fast"][0].error == pytest.approx(np.std(wanted, ddof=1) / np.sqrt(2))
    assert str(rows["fast"][1]) == "-"  # not run yet
    assert against_best(_results({("", 1, 0): 2.0, ("10 %", 1, 1): 3.0}), "train loss") is None


def test_a_study_without_levels_compares_variants_without_loss(tmp_path):
    study = _design(variants={"slow": {"lr": 0.1}, "fast": {"lr": 0.2}}, levels={}).study()
    trials = [(trial.variant, trial.level, trial.seed) for trial in study.trials]
    assert trials == [("slow", None, 1), ("fast", None, 1), ("slow", None, 2), ("fast", None, 2)]
    results = _results_of(study, lambda trial: 1.0 + study.trials.index(trial))
    table = comparison(results, "train loss")
    assert table.headings == ("0 %",) and [entries[0].mean for _, entries in table.rows] == [2, 3]
    assert not any("loss seed" in note or "seed of the losses" in note for note in table.notes)
    assert differences(results, "train loss") == {}
    assert [len(row) for row in against_best(results, "train loss").rows] == [2, 2]
    assert all(file.stat().st_size for file in plot_comparison(results, "train loss", tmp_path / "figure"))


def test_variants_are_compared_with_the_first_or_with_what_the_study_says():
    variants = {"a": {}, "b": {"grad-recovery": "zero"}, "c": {"loss-unit": "bucket"}}
    study = _design(variants=variants, loss_seeds=[1], against={"c": "b"}).study()
    values = {"a": 3.0, "b": 4.0, "c": 7.0}
    results = _results_of(study, lambda trial: values[trial.variant] if trial.level else 2.0)
    rows = differences(results, "train loss")["between_variants"].rows
    assert {name: entries[0].mean for name, entries in rows} == {"b": 50, "c, against b": 150}


def test_unfinished_and_diverged_runs():
    losses = {("", 1, 0): 2.0, ("", 2, 0): 3.0, ("10 %", 1, 1): 3.0, ("10 %", 3, 1): 9.0}
    results = _results(losses)
    table = comparison(results, "train loss")
    _none, ten = table.rows[0][1]
    # Seed 3 has nothing to be compared with, seed 2 no lossy run.
    assert ten.change == pytest.approx(50) and ten.change_error is None and ten.runs == 2
    assert any(note.startswith("unfinished: 5 of 9") for note in table.notes)
    diverged = _results({**losses, ("10 %", 2, 1): float("nan")})
    assert str(comparison(diverged, "train loss").rows[0][1][1]) == "diverged in 1 of 3 runs"
    assert str(comparison(_results({("10 %", 1, 1): 2.0}), "train loss").rows[0][1][0]) == "-"
    assert list(loss_metrics(results.weights)) == ["train loss", "train PPL", "val loss", "val PPL"]
    assert str(Difference.of({1: 1.0, 2: math.nan})) == "diverged" and str(Difference.of({})) == "-"


def test_the_papers_changes_follow_from_its_losses():
    """Within what rounding its losses to three digits leaves open."""
    for metric, values in PAPER_TABLE_1.items():
        for value, change in zip(values[1:], PAPER_CHANGES[metric], strict=True):
            slack = 100 * (0.0005 / values[0] + 0.0005 * value / values[0] ** 2) + 0.005
            assert abs(100 * (value / values[0] - 1) - change) <= slack + 0.01, (metric, value)


_SCALARS = ("drift owner", "drift owner predicted", "grad norm")


def _scalar_results(metrics=_SCALARS, levels=("10 %", "20 %"), variants=("",)):
    """Return runs with random scalars, drift only with loss; drift and prediction by (variant, level, seed)."""
    random = np.random.default_rng(13)
    study = _design(
        levels={level: {"p": 0.1 * number} for number, level in enumerate(levels, 1)},
        variants={variant: {"lr": 0.1 + number} for number, variant in enumerate(variants)},
        settings={**TINY, "drift-interval": 1},
        seeds=[1, 2, 3],
        loss_seeds=[1],
        metrics=metrics,
    ).study()
    runs, drift = {}, {}
    for trial in study.trials:
        run = _run(2.0, replica=2.0)
        run.scalars["grad norm"] = {20: random.uniform(1, 2)}
        if trial.level:
            measured, predicted = random.uniform(1e-7, 2e-7, 2)
            run.scalars |= {"drift owner": {20: measured}, "drift owner predicted": {20: predicted}}
            drift[trial.variant, trial.level, trial.seed] = measured, predicted
        runs[trial.cell.name] = run
    return Results(study, runs), drift


def test_scalars_beside_their_predictions():
    results, drift = _scalar_results()
    tables = scalar_tables(results, ("drift owner", "drift owner predicted"))
    assert list(tables) == ["drift_owner", "drift_owner_against_prediction"]
    ten, twenty = (np.array([drift["", level, seed] for seed in (1, 2, 3)]) for level in ("10 %", "20 %"))
    values = tables["drift_owner"]
    assert values.headings == ("10 %", "20 %")  # there is no drift without loss
    assert [name for name, _ in values.rows] == ["drift owner", "drift owner predicted"]
    for number, (_, entries) in enumerate(values.rows):
        assert entries[0].mean == pytest.approx(ten[:, number].mean())
        assert entries[0].error == pytest.approx(ten[:, number].std(ddof=1) / np.sqrt(3)) and entries[0].change is None
    assert not any("in brackets" in note for note in values.notes)
    [(name, entries)] = tables["drift_owner_against_prediction"].rows
    excess = 100 * (twenty[:, 0] / twenty[:, 1] - 1)
    assert name == "drift owner" and entries[1].mean == pytest.approx(excess.mean())
    assert entries[1].error == pytest.approx(excess.std(ddof=1) / np.sqrt(3))
    header, *lines = run_table(results).splitlines()
    assert header.endswith("val loss,drift owner,drift owner predicted,grad norm")
    assert lines[0].split(",")[-3:-1] == ["", ""] and lines[1].split(",")[-3] == str(ten[0, 0])


def test_scalars_that_are_there_without_loss_have_changes():
    results, _ = _scalar_results(variants=("a", "b"))
    tables = scalar_tables(results, ("grad norm",))
    assert list(tables) == ["grad_norm"]
    assert tables["grad_norm"].headings == ("0 %", "10 %", "20 %")
    assert [name for name, _ in tables["grad_norm"].rows] == ["a", "b"]
    assert all(entry.change is not None for _, (_, *entries) in tables["grad_norm"].rows for entry in entries)
    assert any("in brackets" in note for note in tables["grad_norm"].notes)
    # Scalars that no run recorded are reported as missing.
    [(_, entries), _] = scalar_tables(results, ("survivors mean",))["survivors_mean"].rows
    assert set(map(str, entries)) == {"-"}


def test_tables_are_made_again_from_the_record(tmp_path):
    """Runs that diverged, were never evaluated or are missing as well, and with both kinds of weights."""
    results, _ = _scalar_results(variants=("a", "b"))
    first, second, third, *others = results.runs
    results.runs[first].train[20] = math.nan
    results.runs[second].valid.clear()
    for name in others:
        results.runs[name].valid["owner"] = {20: 1.9}
        results.runs[name].origin.update(date="2026-11-23", hardware="a machine", versions={"torch": "2.13"})
    results = replace(results, runs={name: run for name, run in results.runs.items() if name != third})
    write_record(results, tmp_path)
    again = results_of(read_record("FOLDER", tmp_path), results.study, tmp_path)
    wanted, found = tables(results), tables(again)
    assert wanted.keys() == found.keys() and {"replica_against_owner", "grad_norm"} <= found.keys()
    for name, table in wanted.items():
        assert (table.markdown(), table.csv()) == (found[name].markdown(), found[name].csv()), name
    assert "- trained 2026-11-23 on a machine, with torch 2.13" in found["grad_norm"].markdown()
    assert "unfinished: 1 of" in found["grad_norm"].markdown()
    for other in (replace(results.study, title="other"), replace(results.study, trials=results.study.trials[1:])):
        with pytest.raises(UsageError, match="must hold the report of"):
            results_of(read_record("FOLDER", tmp_path), other, tmp_path)
    first, second = (replace(one, study=replace(one.study, metrics=(), paper=True)) for one in (again, results))
    assert tables(first)["table1"].markdown() == tables(second)["table1"].markdown()
    assert not write_figures(first, tmp_path, curves=False)


def test_a_report_is_not_replaced_by_that_of_other_settings(tmp_path):
    def report(levels=("10 %", "20 %"), **changes) -> Results:
        study = _design(levels={level: {"p": float(level[:-2]) / 100} for level in levels}, **changes).study()
        return Results(study, {cell.name: _run(2.0, replica=2.0) for cell in study.cells})

    write_record(report(), tmp_path)
    variants = {"": {}, "fast": {"lr": 0.1}}
    for larger in ({}, {"seeds": [1, 2, 3, 4]}, {"loss_seeds": [1, 2, 7]}, {"variants": variants}):
        check_out(tmp_path, report(**larger).study)
    for changes, message in (
        ({"seeds": [1]}, "a larger report, with 0 %, seed 2"),
        ({"levels": ["10 %"]}, "a larger report, with 20 %, seed 1, loss seed 1001"),
        ({"settings": TINY | {"lr": 0.1}}, "a report with other settings, of 0 %, seed 1"),
        ({"settings": TINY | {"grad-recovery": "zero"}}, "a report with other settings, of 10 %, .* loss seed 1001"),
    ):
        with pytest.raises(UsageError, match=f"holds {message}; choose another folder"):
            check_out(tmp_path, report(**changes).study)


def test_metrics_of_the_command_line_replace_those_of_the_file(tmp_path):
    file = str(_study_file(tmp_path, metrics=["seconds"]))
    for given, metrics in ((["--metrics", "grad norm"], ("grad norm",)), ([], ("seconds",))):
        study, *_ = commands._read_study([file, *given])
        assert study.metrics == metrics
    with pytest.raises(UsageError, match="--metrics 'nothing': is not recorded"):
        commands._read_study([file, "--metrics", "nothing"])


def _folder(root) -> CellFolder:
    return CellFolder(root, _design().study().cells[0])


def test_a_cell_has_one_holder(tmp_path):
    mine, other = _folder(tmp_path), _folder(tmp_path)
    assert not mine.taken
    log = mine.take()
    assert log is not None and other.take() is None and other.taken
    log.close()
    assert not other.taken and other.take() is not None


def test_trainers_that_a_killed_study_left_behind_keep_others_out_of_their_folder(tmp_path):
    folder = _folder(tmp_path)
    with folder.take() as log:
        left = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, stdout=log)
    try:
        tally = run_cells([folder.cell], tmp_path, 1)
        assert tally.elsewhere == 1 and not tally.failed and folder.taken
    finally:
        left.communicate(b"\n")
    assert not folder.taken


def _study_file(folder: Path, **changes) -> Path:
    content = {"title": "T", "question": "Q?", "settings": TINY, "seeds": [1], "loss-seeds": [1]}
    content |= {"levels": {"20 %": {"p": 0.2}}, **changes}
    file = folder / "study.yaml"
    file.write_text(json.dumps(content))  # JSON is YAML
    return file


def _report(folder: Path, *arguments: str, fresh: bool = False) -> Program | subprocess.Popen:
    """Return a study with what it reports in ``folder``. ``fresh``: it and its trainers start as for a user."""
    arguments += ("--cells", str(folder / "cells"), "--out", str(folder / "out"))
    if not fresh:
        return Program("megatron_lossy.lab", *arguments, merged=True)
    command = [sys.executable, "-m", "megatron_lossy.lab", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def _losses(folder: Path) -> dict[str, dict]:
    runs = {path.parent.name: cells.read_run(path) for path in (folder / "cells").glob("*/metrics.jsonl")}
    return {name: (run.train, run.valid) for name, run in runs.items()}


def test_cells_run_once_and_survive_an_interruption(tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    whole.mkdir(), broken.mkdir()
    settings = {**TINY, "train-iters": 30, "save-interval": 5, "drift-interval": 3}
    file = _study_file(tmp_path, settings=settings, metrics=["drift owner", "drift owner predicted"])
    # Two processes share the cells of a study; a third one is interrupted.
    pair = [_report(whole, str(file), "--jobs", "1") for _ in range(2)]
    third = _report(broken, str(file), "--jobs", "2")
    metrics = lambda: [path.read_text() for path in broken.glob("cells/*/metrics.jsonl")]
    until(lambda: any(text.count("\n") > 3 for text in metrics()), third, seconds=100)
    third.send_signal(signal.SIGINT)
    output = third.communicate(timeout=60)[0]
    assert third.returncode == 1 and "run the same command again" in output, output
    outputs = [process.communicate(timeout=100)[0] for process in pair]
    assert all(process.returncode == 0 for process in pair), outputs
    assert sum("cells done" in output or "cells, 0 of them done" in output for output in outputs)
    third = _report(broken, str(file), "--jobs", "2")
    output = third.communicate(timeout=100)[0]
    assert third.returncode == 0, output
    assert _losses(whole) == _losses(broken) and len(_losses(whole)) == 2
    names = {name for path in whole.glob("cells/*/metrics.jsonl") for name in cells.read_run(path).scalars}
    assert "drift owner" in names and names <= set(AXES)
    assert not list(whole.glob("cells/*/iter_*"))
    # Once more: nothing runs, the report stays the same.
    before = (broken / "out/val_loss.csv").read_text()
    again = _report(broken, str(file), fresh=True)
    output = again.communicate(timeout=100)[0]
    assert "cells, " not in output and "20 %" in output and (broken / "out/val_loss.csv").read_text() == before
    names = ("val_loss.png", "val_loss.pdf", "val_loss.md", "study.json")
    for name in (*names, "drift_owner.png", "drift_owner_against_prediction.md"):
        assert (broken / "out" / name).stat().st_size > 0
    # Without the cells: from what the report has recorded.
    copy = tmp_path / "copy"
    copy.mkdir()
    shutil.copy(broken / "out" / RECORD, copy)
    commands.report([str(copy)])
    assert {path.name for path in copy.iterdir()} == {path.name for path in (broken / "out").iterdir()}
    for path in copy.iterdir():
        if path.suffix != ".pdf":  # which has the time
            assert path.read_bytes() == (broken / "out" / path.name).read_bytes(), path.name


@pytest.mark.slow
def test_a_killed_cell_goes_on_if_it_got_further(tmp_path):
    file = _study_file(tmp_path, settings={**TINY, "train-iters": 200, "save-interval": 20})
    # The second trainer must not get to a checkpoint before it is killed: its imports give us the time.
    study = _report(tmp_path, str(file), "--jobs", "1", fresh=True)

    def kill_when(ready) -> None:
        trainers = lambda: psutil.Process(study.pid).children()
        until(lambda: ready() and trainers(), study, seconds=100)  # the log is there before the trainer is
        (trainer,) = trainers()
        trainer.kill()

    # The first one after a checkpoint, the second one before any.
    kill_when(lambda: list(tmp_path.glob("cells/*/latest_checkpointed_iteration.txt")))
    kill_when(lambda: len(list(tmp_path.glob("cells/*/train.log"))) == 2)
    output = study.communicate(timeout=100)[0]
    assert study.returncode == 1, output
    assert output.count("was ended by SIGKILL at iteration") == 1 and output.count("exit status -9") == 2, output
    ((run, _),) = _losses(tmp_path).values()
    assert list(run) == list(range(1, 201))


def test_a_failed_cell_does_not_stop_the_others(tmp_path):
    settings = {name: value for name, value in TINY.items() if name != "data"}
    broken = {"data-path": [str(tmp_path / "none")], "valid-data-path": [str(tmp_path / "none")]}
    file = _study_file(tmp_path, settings=settings, variants={"good": {"data": "stdlib"}, "broken": broken})
    process = _report(tmp_path, str(file), "--jobs", "4")
    output = process.communicate(timeout=200)[0]
    assert process.returncode == 1
    assert "exit status 2" in output and str(tmp_path / "none") in output
    assert len(list(tmp_path.glob("cells/*/cell.json"))) == 2
    rows = {line.split("  ")[0]: line for line in reversed(output.splitlines())}  # of the first table
    assert "(" in rows["good"] and rows["broken"].split()[1:] == ["-", "-"]
