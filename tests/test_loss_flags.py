"""A short ``--help``, ``--help-loss`` for the rest of the loss flags, and presets of them."""

import argparse
import dataclasses
import re
import sys

import pytest
import yaml

from megatron_lossy import plugin
from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.flags import flag_groups, flag_name
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.loss_flags import (
    add_loss_flags,
    find_preset,
    help_loss,
    preset_arguments,
    presets,
    sections,
    with_preset,
)
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.lab.launch.plan import make_plan
from megatron_lossy.lab.studies import commands
from megatron_lossy.lab.train.__main__ import main as train
from megatron_lossy.lab.train.arguments import configurations, make_parser, read_arguments
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.facts import of_trainer
from tests.programs import run_program
from tests.ranks import run_ranks
from tests.trainer import ROOT, TINY, train_runs

PRESETS_NEED = (ROOT / "docs/flags.md").read_text().partition("long enough for an exchange:")[2].partition("\n\n")[0]

pytestmark = pytest.mark.shows("short help, `--help-loss`, presets", device=False)

ALL = {f.name: flag_name(LossyConfig, f.name) for f in dataclasses.fields(LossyConfig)}
TINY_FILE = str(ROOT / "configs/tiny/llama_1m.yaml")
#: Intervals that fit into runs of two iterations.
SHORT = {
    "asyncmesh": ["--sync-delay", "1"],
    "diloco": ["--sync-interval", "1"],
    "paft": ["--param-sync-interval", "1", "--no-use-distributed-optimizer"],
    "wan": ["--udp-port", "0"],
}


def read(*arguments):
    return configurations(read_arguments(make_parser("test", ""), ["--config", TINY_FILE, *arguments]))


def own(tmp_path, text):
    file = tmp_path / "own.yaml"
    file.write_text(text)
    return str(file)


def flags_in(text):
    """The flags that a help text has an entry for."""
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("columns", ["80", "120"])
@pytest.mark.parametrize(
    "parser", [make_parser("p", ""), add_loss_flags(argparse.ArgumentParser("p"), "lossy exchange")]
)
def test_help_takes_at_most_90_lines(parser, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    text = parser.format_help()
    assert text.count("\n") <= 90
    shown = flags_in(text[text.index("\nlossy exchange:") :])
    assert 20 <= len(shown & set(ALL.values())) <= 26 and {"--loss-preset", "--help-loss"} <= shown
    assert {"--p-grad", "--transport", "--islands"} <= shown and "--udp-fec" not in shown


def test_help_all_has_every_flag(capsys):
    with pytest.raises(SystemExit) as ended:
        train(["--help-all"])
    assert not ended.value.code
    trained = {flag_name(TrainConfig, f.name) for f in dataclasses.fields(TrainConfig)}
    assert flags_in(capsys.readouterr().out) == trained | set(ALL.values())


def test_what_help_hides_is_accepted_and_proposed():
    parser = make_parser("test", "")
    assert parser.parse_args(["--udp-rate", "1gbit"]).udp_rate == ["1gbit"]
    with pytest.raises(UsageError, match="did you mean --udp-rate$"):
        parser.parse_args(["--udp-rates", "3"])


def test_help_loss_has_every_flag_with_its_whole_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100000")
    text = help_loss("all")
    assert flags_in(text) == set(ALL.values())
    for f in dataclasses.fields(LossyConfig):
        assert f.metadata["flag"]["help"].replace("%%", "%") in text, f.name
    for name, heading in sections().items():
        assert flags_in(help_loss(name)) == {ALL[f.name] for f in flag_groups(LossyConfig)[heading]}
    assert {"what-is-lost", "islands", "evaluation-checkpoints-drift"} < set(sections())


@pytest.mark.parametrize("given", [["--help-loss"], ["--help-loss", "islands"], ["--help-loss=presets"]])
def test_help_loss_ends_the_program_well(given, capsys):
    for program in (train, plugin.parse_loss_flags):
        with pytest.raises(SystemExit) as ended:
            program(["--p-grad", "0.1", *given])
        assert not ended.value.code
        *_, section = "".join(given).replace("=", "--help-loss").split("--help-loss")
        assert capsys.readouterr().out.strip() == help_loss(section or "all")


def test_the_launcher_shows_sections_without_a_script():
    done = run_program("megatron_lossy", "--help-loss", "transport")
    assert done.returncode == 0 and flags_in(done.stdout) == flags_in(help_loss("transport")), done.stderr


@pytest.mark.parametrize("name", presets())
def test_a_preset_sets_what_its_file_says_and_is_not_refused(name):
    train, loss = read("--loss-preset", name, *SHORT.get(name, [])[2:])
    for key, value in yaml.safe_load(find_preset(name).read_text()).items():
        found = getattr(loss, key.replace("-", "_"))
        assert found in (value, (value,), tuple(value) if isinstance(value, list) else value), key
    virtual = dataclasses.replace(train, virtual_workers=4)
    check_refusals(loss, of_trainer(train, 2))
    if name != "wan":
        check_refusals(loss, of_trainer(virtual, 1))
    sharded = train.use_distributed_optimizer
    check_refusals(loss, Facts(workers=4, virtual=False, flushes=True, distributed_optimizer=sharded, train_iters=200))


@pytest.mark.parametrize(("name", "least"), re.findall(r"`(\w+)`(?: needs)?\s(\d+)", PRESETS_NEED))
def test_the_least_iterations_of_a_preset_are_those_of_the_page(name, least):
    _, loss = read("--loss-preset", name)
    check_refusals(loss, Facts(workers=4, train_iters=int(least)))
    with pytest.raises(UsageError, match="--sync"):
        check_refusals(loss, Facts(workers=4, train_iters=int(least) - 1))


def test_the_order_is_preset_file_command_line(tmp_path):
    text = (ROOT / "configs/tiny/llama_1m.yaml").read_text()
    file = own(tmp_path, text + "\np-grad: 0.3\nloss-unit: bucket\n")
    preset = ["--loss-preset", "paper"]
    assert (read(*preset)[1].p_grad, read(*preset)[1].loss_unit) == (0.1, "shard")
    loss = read(*preset, "--config", file)[1]
    assert (loss.p_grad, loss.p_param, loss.loss_unit) == (0.3, 0.1, "bucket")
    for arguments in (["--p-grad", "0.4", *preset], [*preset, "--p-grad", "0.4"]):
        loss = read("--config", file, *arguments)[1]
        assert (loss.p_grad, loss.p_param, loss.loss_unit) == (0.4, 0.1, "bucket")
    assert not read("--loss-preset", "paft", "--no-param-sync-overlap")[1].param_sync_overlap


def test_a_preset_of_ones_own(tmp_path, monkeypatch):
    bursts = "loss-model: [bernoulli, 'gilbert-elliott:0.1,0.2,0.0,0.9']\n"
    file = own(tmp_path, bursts + "p_grad: 0.2\nlossy-self: true\nsave-replicas: false\n")
    loss = read("--loss-preset", file)[1]
    assert (loss.p_grad, loss.lossy_self, loss.save_replicas) == (0.2, True, False)
    assert loss.loss_model == ("bernoulli", "gilbert-elliott:0.1,0.2,0.0,0.9")
    (tmp_path / "paper").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read("--loss-preset", "paper")[1].p_grad == 0.1  # a folder of that name is none


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("p-gard: 0.1", "own.yaml: unknown key p-gard, did you mean p-grad"),
        ("lr: 0.1", "own.yaml: unknown key lr"),
        ("p-grad: much", "own.yaml: --p-grad: invalid float value: 'much'"),
        ("lossy-self: 1", "own.yaml: lossy-self 1: must be true or false"),
        ("[p-grad]", "own.yaml: must be a mapping from names to values"),
    ],
)
def test_a_wrong_preset_is_refused_by_name(text, named, tmp_path):
    file = own(tmp_path, text)
    for refused in (lambda: read("--loss-preset", file), lambda: plugin.parse_loss_flags([f"--loss-preset={file}"])):
        with pytest.raises(UsageError, match=f"^--loss-preset .*{re.escape(named)}"):
            refused()


def test_megatrons_parser_gets_the_flags_of_a_preset(monkeypatch):
    """Its log and its checkpoints then hold what the run lost."""
    installed = []
    monkeypatch.setattr(plugin, "install", lambda config, steps: installed.append((config, steps)))
    monkeypatch.setattr(plugin, "_install_once", lambda name, patches: None)
    monkeypatch.setattr(sys, "argv", ["script", "--p-grad", "0.3", "--loss-preset", "paper", "--train-iters", "7"])
    plugin._obey_command_line()
    [(config, steps)] = installed
    assert (config.p_grad, config.p_param, steps) == (0.3, 0.1, 7)
    assert sys.argv[0] == "script" and not any("preset" in word for word in sys.argv)
    parser = add_loss_flags(argparse.ArgumentParser(), "loss")
    parser.add_argument("--train-iters", type=int)
    seen = parser.parse_args(sys.argv[1:])
    assert (seen.p_grad, seen.p_param, seen.train_iters) == (0.3, 0.1, 7)


def test_the_script_of_the_launcher_gets_them_too(tmp_path):
    """Without a preset the command line stays as it is, also what only the script can read."""
    given = ["--", "--x", "--loss-presets", "1"]
    assert with_preset(given) == given and not preset_arguments(given)
    assert with_preset(["--x", "1", "--loss-preset=paper"])[-2:] == ["--x", "1"]
    assert with_preset(with_preset(["--loss-preset=paper"])) == with_preset(["--loss-preset=paper"])


def test_the_cluster_launcher_takes_presets(tmp_path):
    given = ["--config", TINY_FILE, "--program", "train", "--device", "cpu", "--accelerators", "4"]
    plan = make_plan([*given, "--out", str(tmp_path), "--loss-preset", "packets", "--p-grad", "0.4"])
    assert (plan.lossy.p_grad, plan.lossy.p_param, plan.lossy.param_send) == (0.4, 0.2, "compensated")
    assert read(*plan.module[1:])[1] == plan.lossy
    swept = make_plan([*given, "--out", str(tmp_path), "--loss-preset", "packets", "--rate", "0.3"])
    assert (swept.lossy.p_grad, swept.lossy.p_param, swept.lossy.loss_unit) == (0.3, 0.3, "packet")


def test_studies_take_presets(tmp_path):
    file = tmp_path / "study.yaml"
    file.write_text(f"title: T\nconfig: {TINY_FILE}\nlevels:\n  20 %: {{p: 0.2}}\n")
    study, *_ = commands._read_study([str(file), "--virtual-workers", "2", "--loss-preset", "smart"])
    lossy = [trial.cell.loss for trial in study.trials if trial.level is not None]
    assert lossy and {(loss.p_grad, loss.p_param, loss.grad_recovery) for loss in lossy} == {
        (0.2, 0.2, "error-feedback")
    }


def short_run(name, data, **more):
    """The tiny run of two iterations with the preset ``name``, for :func:`train_runs`."""
    train, loss = read("--loss-preset", name, *SHORT.get(name, []))
    shape = TINY | {"train_iters": 2, "lr_warmup_iters": 0, "eval_interval": 2, "eval_iters": 1} | more
    sharded = train.use_distributed_optimizer
    return shape | data | {"use_distributed_optimizer": sharded}, dataclasses.asdict(loss)


def test_virtual_workers_train_with_every_preset(data):
    names = [name for name in presets() if name != "wan"]
    runs = [short_run(name, data, virtual_workers=2) for name in names]
    [(summaries, output)] = run_ranks(train_runs, 1, *runs)
    assert [summary["diverged"] for summary in summaries] == [None] * len(names), output
    assert len(re.findall(r"iteration +2/ +2 ", output)) == len(names)
    for said in ("gradients 10 %", "compensated", "error-feedback", "diloco", "5 % of", "gaussian"):
        assert said in output.lower(), said


def test_ranks_train_over_udp_with_the_preset_for_it(data):
    found = run_ranks(train_runs, 2, short_run("wan", data))
    assert [summaries[0]["diverged"] for summaries, _ in found] == [None, None]
    assert "udp" in found[0][1] and re.search(r"iteration +2/ +2 ", found[0][1])
