"""Flags: one source, allowed values, one-line errors."""

import argparse
import dataclasses
import math
import re

import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.flags import add_flags, flag_groups, from_namespace
from megatron_lossy.base.section import Flags
from megatron_lossy.channel.bernoulli import Bernoulli
from megatron_lossy.config import SECTIONS, LossyConfig, PhaseLoss, Schedule, given, value_of
from megatron_lossy.lab.train.config import TrainConfig
from scripts.update_docs import flag_table, flag_tables
from tests.refusal_examples import EXAMPLES

pytestmark = pytest.mark.shows("flags: allowed values, sections, schedules, what does nothing is said", device=False)


def parse(*arguments):
    parser = add_flags(argparse.ArgumentParser(), LossyConfig, "loss")
    return from_namespace(LossyConfig, parser.parse_args(arguments))


@pytest.mark.parametrize("cls", [LossyConfig, TrainConfig])
def test_flags_are_grouped_by_mechanism(cls):
    groups = flag_groups(cls)
    assert "" not in groups and len(groups) >= 7
    assert max(len(fields) for fields in groups.values()) <= 20
    assert sorted(f.name for fields in groups.values() for f in fields) == sorted(
        f.name for f in dataclasses.fields(cls)
    )
    parser = add_flags(argparse.ArgumentParser(prog="p"), cls, "ours", "as elsewhere")
    titles = [group.title for group in parser._action_groups if group.title.startswith("ours")]
    assert titles == [f"ours: {heading}" for heading in groups]
    headings = re.findall(r"^### (.*)$", flag_tables(cls), re.MULTILINE)
    assert [heading.lower() for heading in headings] == list(groups)
    table = flag_table(cls).splitlines()
    assert sorted(table) == sorted(
        table[:2] + [row for row in flag_tables(cls).splitlines() if row.startswith("| `--")]
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--p-grad", "1"], "--p-grad 1.0"),
        (["--p-grad", "-0.1"], "--p-grad -0.1"),
        (["--p-param", "nan"], "--p-param nan"),
        (["--p-param", "inf"], "--p-param inf"),
        (["--packet-bytes", "0"], "--packet-bytes 0"),
        (["--loss-seed", "-1"], "--loss-seed -1"),
        (["--async-pipeline", "--virtual-stages", "0"], "--virtual-stages 0: must be at least 1"),
        (["--drift-interval", "-1"], "--drift-interval -1: must be at least 0"),
        (["--loss-model", "per-link"], "per-link:FILE"),
        (["--loss-model", "trace"], "--trace PATH"),
        (["--loss-model", "bernoulli", "bernoulli", "trace"], "--loss-model bernoulli bernoulli trace"),
        (["--trace", "x.npz"], "--trace x.npz"),
        (["--loss-model", "gilbert-elliott:0.1,0.5,0"], "gilbert-elliott:0.1,0.5,0: takes a mean burst"),
        (["--loss-model", "gilbert-elliott:0,0,0,1"], "gilbert-elliott:0.0,0.0,0.0,1.0: PGB"),
        (["--loss-model", "gilbert-elliott:0.1,2,0,1"], "gilbert-elliott:0.1,2.0,0.0,1.0: must be"),
        (["--loss-model", "gilbert-elliott:0.5,0,0,1"], "mean loss rate must be below 1"),
        (["--loss-model", "gilbert-elliott:0.5"], "--loss-model gilbert-elliott:0.5"),
        (["--loss-model", "gilbert-elliott", "--p-grad", "0.9"], "--p-grad 0.9"),
        (["--p-grad", "0.1", "--loss-schedule", "0:0.1"], "--p-grad 0.1"),
        (["--loss-schedule", "5:0.1"], "--loss-schedule 5:0.1"),
        (["--loss-schedule", "0:0.1,0:0.2"], "--loss-schedule"),
        (["--loss-schedule", "0:1.5"], "--loss-schedule 0:1.5"),
        (["--loss-schedule", "often"], "--loss-schedule often"),
        (["--lossy-self", "--grad-recovery", "renormalize-remote"], "--lossy-self"),
        (["--metrics-port", "0"], "--metrics-port 0: must be in"),
        (["--metrics-port", "65536"], "--metrics-port 65536: must be in"),
        (["--param-send", "compensated:x"], "--param-send compensated:x: must be plain"),
        (["--param-send", "compensated:-1"], "--param-send compensated:-1: must be plain"),
        (["--param-send", "compensated:inf"], "--param-send compensated:inf: must be plain"),
        (["--param-send", "compensated:0.5,1"], "--param-send compensated:0.5,1: must be plain"),
        (["--param-send", "compensated:0.5,0.1,2"], "--param-send compensated:0.5,0.1,2: must be plain"),
        (["--param-send", "plain:0.5"], "--param-send plain:0.5: must be plain, compensated"),
        (["--param-send", "twice"], "--param-send twice: must be plain, compensated"),
        (["--loss-model", "trace", "--trace", "x", "--loss-correlation", "source"], "--loss-correlation source"),
    ],
)
def test_a_wrong_value_is_named(arguments, named):
    with pytest.raises(UsageError) as error:
        parse(*arguments)
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_phases_can_differ():
    config = parse("--loss-model", "bernoulli", "gilbert-elliott", "--p-grad", "0.1", "--p-param", "0.2")
    assert config.phase("grad").model == "bernoulli"
    assert config.phase("param").model == "gilbert-elliott"
    assert config.phase("param").burst == 4
    config = parse("--loss-schedule", "0:0,10:0.5", "0:0")
    assert not config.phase("grad").lossless and config.phase("param").lossless


def test_schedule_is_a_step_function():
    schedule = Schedule.parse("0:0,10:0.25,20:0.5")
    rate = Bernoulli(PhaseLoss("bernoulli", schedule), 0).rate
    assert [rate(step) for step in (0, 9, 10, 19, 20, 10**9)] == [0, 0, 0.25, 0.25, 0.5, 0.5]
    assert math.isclose(max(schedule.rates), 0.5)


def test_bursts_of_one_phase_of_two_are_used():
    assert parse("--loss-model", "bernoulli", "gilbert-elliott:8").phase("param").burst == 8.0
    gradients = LossyConfig(p_grad=0.1, loss_model=("bernoulli", "gilbert-elliott:8")).drawn_with("param")
    assert gradients.phase("param") == gradients.phase("grad") == LossyConfig(p_grad=0.1).phase("grad")


def test_both_halves_of_an_all_reduce_have_the_schedule_of_gradients():
    halves = LossyConfig(loss_schedule=("0:0.1,5:0", "0:0")).drawn_with("param")
    for phase in ("grad", "param"):
        assert [Bernoulli(halves.phase(phase), 0).rate(step) for step in (0, 4, 5)] == [0.1, 0.1, 0]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"param_send": "compensated"}, "--param-send compensated does nothing, since no parameter is lost"),
        (
            {"loss_unit": "packet", "lossy_self": True, "grad_recovery": "zero"},
            "--grad-recovery zero and --lossy-self do nothing, since no gradient is lost",
        ),
        ({"transport": "pieces", "lossy_self": True}, "--lossy-self does nothing, since no gradient is lost"),
        (
            {"virtual_boundaries": (2, 4), "act_fec": ("8,1,0.02", "8,1,0", "0.5")},
            "--act-fec 8,1,0.02 8,1,0 0.5 and --virtual-boundaries 2 4 do nothing, since nothing between stages is lost",
        ),
        ({"loss_correlation": "source"}, "--loss-correlation source does nothing, since no losses are drawn"),
        (
            {"loss_model": ("gilbert-elliott",), "lossy_links": "inter-node:2"},
            (
                "--loss-model gilbert-elliott does nothing, since no losses are drawn; --lossy-links inter-node:2 does "
                "nothing, since nothing that crosses a link can be lost"
            ),
        ),
    ],
)
def test_what_does_nothing_since_nothing_is_lost_is_said(flags, said):
    assert LossyConfig(**flags).describe().endswith("; " + said)
    assert "nothing" not in LossyConfig(**flags, p_grad=0.1, p_param=0.1, p_act=0.1).describe()


def test_packets_of_another_unit_are_said_to_do_nothing():
    shards = LossyConfig(p_grad=0.1, packet_bytes=1024).describe()
    assert shards.endswith("; simulated; --packet-bytes 1024 does nothing, since the unit of loss is a shard")
    assert "nothing" not in LossyConfig(p_grad=0.1, packet_bytes=1024, loss_unit="packet").describe()


def test_what_does_nothing_in_one_phase_is_not_called_a_part_of_what_is_lost():
    gradients = LossyConfig(p_grad=0.1, param_send="compensated").describe()
    assert gradients.endswith("; simulated; --param-send compensated does nothing, since no parameter is lost")
    parameters = LossyConfig(p_param=0.1, param_send="compensated", grad_recovery="zero").describe()
    assert "parameters sent compensated" in parameters and "recovery" not in parameters.split("; --grad-recovery")[0]


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"p_grad": 0.1, "loss_unit": "packet", "grad_recovery": "error-feedback"},
        {"p_grad": 0.1, "loss_unit": "packet", "grad_recovery": "error-feedback", "grad_priority": "none"},
        {"p_grad": 0.1, "grad_recovery": "error-feedback", "grad_priority": "none"},
        {"p_grad": 0.1, "loss_unit": "packet", "grad_recovery": "zero", "grad_priority": "packet-mean"},
        {"transport": "udp"},
        {"transport": "udp", "packet_bytes": 4096},
        {"transport": "stream", "udp_deadline": "50", "udp_port": 41000},
        {"transport": "udp", "grad_recovery": "error-feedback", "grad_priority": "none"},
        {"p_param": 0.1, "loss_unit": "packet", "packet_bytes": 1408},
    ],
)
def test_what_is_given_makes_the_same_configuration_again(flags):
    """Defaults may depend on other flags: that of --grad-priority is not none with error feedback."""
    config = LossyConfig(**flags)
    assert LossyConfig(**given(config)) == config
    assert given(LossyConfig()) == {}


@pytest.mark.parametrize(
    ("flags", "lost"),
    [
        ({}, "lost 0 %"),
        ({"p_sync": 0.1}, "lost 10 %"),
        ({"transport": "udp"}, "lost what the network loses"),
        ({"transport": "stream"}, "lost what the network loses"),
        ({"transport": "udp", "p_sync": 0.1}, "lost 10 % and what the network loses"),
    ],
)
def test_the_first_line_of_islands_says_what_they_lose(flags, lost):
    said = LossyConfig(islands=2, sync_method="parameters", **flags).describe().split("; ")
    assert next(part for part in said if part.startswith("2 islands")).endswith(f", {lost}")


def test_the_first_line_has_losses_of_the_network_and_drawn_ones_and_stages():
    said = LossyConfig(transport="udp", p_grad=0.1).describe()
    assert said.startswith("what the network loses, and gradients 10 %, parameters 0 %; bernoulli, seed ")
    stages = {"async_pipeline": True, "virtual_stages": 2}
    assert LossyConfig(**stages).describe() == "asynchronous pipeline of 2 virtual stages"
    assert "asynchronous pipeline" in LossyConfig(**stages, p_grad=0.1).describe()


def test_megatrons_parser_says_what_unknown_flags_may_be_meant_for(capsys):
    """It prints its usage, and its own error; both stay."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--use-flash-attn", action="store_true")
    add_flags(add_flags(parser, LossyConfig, "loss"), LossyConfig, "again", only=lambda name: False)
    for words, said in (
        (["--p-grade", "0.1"], "unrecognized arguments: --p-grade 0.1, did you mean --p-grad\n"),
        (["--use-flash-atn"], "unrecognized arguments: --use-flash-atn, did you mean --use-flash-attn\n"),
        (["--xyzzy", "1"], "unrecognized arguments: --xyzzy 1\n"),
        (["--p-grad", "much"], "argument --p-grad: invalid float value: 'much'\n"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert capsys.readouterr().err.endswith(said)


def test_every_question_to_a_section_has_an_answer_of_all_together():
    questions = {name for name, value in vars(Flags).items() if callable(value) and name[0] != "_"}
    assert questions <= vars(LossyConfig).keys()
    config = LossyConfig(grad_error="gaussian:1rms", p_act=0.1, loss_correlation="source")
    assert config.notes_beside() and config.notes() and "no losses are drawn" in config.idle()


def answers(config):
    """Return all answers of ``config``, and its sentences about flags that do nothing."""
    questions = ("exchanges", "changes", "acts", "draws", "notes", "notes_beside", "needs_whole_optimizers")
    return [getattr(config, name)() for name in (*questions, "check", "describe")]


def test_a_section_that_is_not_asked_would_change_nothing(monkeypatch):
    configs = [LossyConfig(**flags) for flags, facts, _ in EXAMPLES if facts]  # without, the flags alone are refused
    assert all(len(config.used) < len(SECTIONS) for config in configs)
    few = [answers(config) for config in configs]
    monkeypatch.setattr(LossyConfig, "used", SECTIONS)
    assert [answers(config) for config in configs] == few


def test_a_configuration_has_the_attributes_of_its_flags_alone():
    config = LossyConfig(p_grad=0.1)
    assert config.describe() and vars(config).keys() == {field.name for field in dataclasses.fields(config)}


def test_values_of_phases_come_in_the_order_of_exchanges():
    assert [value_of("ab", phase) for phase in ("grad", "param")] == ["a", "b"]
    three = ("grad", "param", "mine")
    assert [value_of("abc", phase, three) for phase in three] == ["a", "b", "c"]
    assert [value_of("ab", phase, three) for phase in three] == ["a", "b", "a"]
    assert value_of("a", "mine", three) == "a"
    with pytest.raises(ValueError, match="mine"):
        value_of("ab", "mine")


@pytest.mark.parametrize("transport", ["udp", "stream"])
def test_the_network_that_loses_is_between_islands(transport):
    islands = {"islands": 2, "sync_method": "parameters", "transport": transport}
    config = LossyConfig(**islands)
    assert config.untouched("grad") and config.untouched("param") and config.loses("sync-reduce")
    assert "over" not in config.describe() and "lost what the network loses" in config.describe()
    assert LossyConfig(**islands, p_grad=0.1).loses("grad") and not LossyConfig(**islands, p_grad=0.1).loses("param")
    assert LossyConfig(transport=transport).loses("grad")
