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
    names = [f.name for fields in groups.values() for f in fields]
    assert sorted(names) == sorted(f.name for f in dataclasses.fields(cls))
    parser = add_flags(argparse.ArgumentParser(prog="p"), cls, "ours", "as elsewhere")
    titles = [group.title for group in parser._action_groups if group.title.startswith("ours")]
    assert titles == [f"ours: {heading}" for heading in groups]
    headings = re.findall(r"^### (.*)$", flag_tables(cls), re.MULTILINE)
    assert [heading.lower() for heading in headings] == list(groups)
    table = flag_table(cls).splitlines()
    rows = [row for row in flag_tables(cls).splitlines() if row.startswith("| `--")]
    assert sorted(table) == sorted(table[:2] + rows)


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


ACT = {"p_act": 0.1}
NOISE = {"grad_error": "gaussian:1.0"}
EACH = {"param_sync_interval": 1}
FEEDBACK = {"p_grad": 0.1, "loss_unit": "packet", "grad_recovery": "error-feedback"}
UDP, STREAM = {"transport": "udp"}, {"transport": "stream"}
FOUR = {"islands": 4, "sync_method": "parameters"}
EAGER = {"sync_method": "eager-diloco", "sync_delay": 1}
HALVES = {"sync_method": "diloco", "sync_fraction": 0.5, "sync_interval": 2}
REFUSED = [
    ({"grad_error": "noise"}, "--grad-error noise: must be one of none, gaussian, bit-flip"),
    ({"grad_error": "gaussian"}, "--grad-error gaussian: must be gaussian:STD or"),
    ({"grad_error": "gaussian:0.0"}, "--grad-error gaussian:0.0: must be finite"),
    ({"grad_error": "gaussian:-1.0"}, "--grad-error gaussian:-1.0: must be finite"),
    ({"grad_error": "gaussian:nan"}, "--grad-error gaussian:nan: must be finite"),
    ({"grad_error": "gaussian:infrms"}, "--grad-error gaussian:infrms: must be finite"),
    ({"grad_error": "gaussian:1e39"}, "--grad-error gaussian:1e39: must be finite in float32 (at most 3.4e+38)"),
    ({"grad_error": "gaussian:0,9,0.0"}, "--grad-error gaussian:0,9,0.0: must be finite"),
    ({"grad_error": "gaussian:1.0,1.5,1.0"}, "--grad-error gaussian:1.0,1.5,1.0: must be gaussian:STD or"),
    ({"grad_error": "gaussian:1.0,-1,1.0"}, "--grad-error gaussian:1.0,-1,1.0: must be gaussian:STD or"),
    (NOISE | {"grad_error_rate": 1.5}, "--grad-error-rate 1.5: must be in [0, 1]"),
    (NOISE | {"grad_error_rate": float("nan")}, "--grad-error-rate nan: must be in [0, 1]"),
    (NOISE | {"grad_error_ranks": (1, 1)}, "--grad-error-ranks 1 1: must be different"),
    (NOISE | {"grad_error_ranks": (-1,)}, "--grad-error-ranks -1: must be"),
    (NOISE | {"grad_error_at": "owner"}, "--grad-error-at owner: must be one of"),
    ({"grad_error": "gaussian:much"}, "--grad-error gaussian:much: must be gaussian:STD"),
    ({"grad_error": "bit-flip:0"}, "--grad-error bit-flip:0: must be bit-flip, bit-flip:K or"),
    ({"grad_error": "bit-flip:1,3,32"}, "--grad-error bit-flip:1,3,32: needs 0 <= LOW <= HIGH <= 31"),
    ({"grad_error": "bit-flip:1,5,4"}, "--grad-error bit-flip:1,5,4: needs"),
    ({"grad_error": "none:1"}, "--grad-error none:1: must be one of none, gaussian"),
    ({"grad_error_rate": 0.5}, "--grad-error-rate 0.5: needs --grad-error gaussian or bit-flip, not none"),
    ({"param_sync_interval": -1}, "--param-sync-interval -1: must be at least 0"),
    ({"param_sync_rule": "snr"}, "--param-sync-rule snr: needs --param-sync-interval"),
    ({"param_sync_overlap": True}, "--param-sync-overlap on: needs --param-sync-interval"),
    (EACH | {"param_sync_rule": "often"}, "--param-sync-rule often: must be fixed, snr, divergence"),
    (EACH | {"param_sync_rule": "divergence:0.0"}, "--param-sync-rule divergence:0.0: TAU must be a finite number"),
    (EACH | {"param_sync_rule": "divergence:nan"}, "--param-sync-rule divergence:nan: TAU must be"),
    (EACH | {"param_sync_rule": "snr:0.2"}, "--param-sync-rule snr:0.2: must be fixed, snr, divergence or"),
    ({"param_sync_interval": 5000, "param_sync_rule": "divergence"}, "--param-sync-interval 5000: must be at most 10"),
    ({"replica_check": "mend"}, "--replica-check mend: must be one of none, log, repair, abort"),
    ({"p_act_grad": -0.1}, "--p-act-grad -0.1: must be in [0, 1)"),
    ({"p_act": float("nan")}, "--p-act nan: must be in"),
    (ACT | {"act_fec": ("9,1,0", "9,1,0", "1.1")}, "--act-fec 9,1,0 9,1,0 1.1: must be off, or B,C,SHARE"),
    (ACT | {"act_fec": ("0,0,0.01", "9,1,0", "0")}, "--act-fec 0 0: needs 1 <= C <= B"),
    (ACT | {"act_fec": ("100,34,1.0", "9,1,0", "0")}, "--act-fec 100,34,1.0 9,1,0 0: must be off, or"),
    (ACT | {"act_fec": ("100,10.5,0.1", "9,1,0", "0")}, "--act-fec 100,10.5,0.1 9,1,0 0: must be"),
    (ACT | {"act_fec": ("9,1,0", "0")}, "--act-fec 9,1,0 0: must be"),
    (ACT | {"act_fec": ("maybe",)}, "--act-fec maybe: must be off, or B,C,SHARE of high"),
    (ACT | {"virtual_boundaries": (0,)}, "--virtual-boundaries 0: must be different layers, from 1 on"),
    (ACT | {"virtual_boundaries": (1, 1)}, "--virtual-boundaries 1 1: must be different layers"),
    (FEEDBACK | {"grad_priority": "packet-mean:1.1"}, "--grad-priority packet-mean:1.1: must be one of none"),
    (FEEDBACK | {"grad_priority": "element-quantile:-0.1"}, "--grad-priority element-quantile:-0.1: must be"),
    (FEEDBACK | {"grad_priority": "packet-mean:nan"}, "--grad-priority packet-mean:nan: must be"),
    (FEEDBACK | {"grad_priority": "none:0.2"}, "--grad-priority none:0.2: must be one of none"),
    (FEEDBACK | {"grad_priority": "most"}, "--grad-priority most: must be one of none, packet-mean"),
    (UDP | {"udp_fec": ("10",)}, "--udp-fec 10: must be auto, auto PERCENT, or B C"),
    (UDP | {"udp_fec": ("10", "256")}, "--udp-fec 10 256: needs 0 <= C, C at most 255"),
    (UDP | {"udp_fec": ("0", "0")}, "--udp-fec 0 0: needs"),
    (UDP | {"udp_fec": ("a", "b")}, "--udp-fec a b: must be auto"),
    (UDP | {"udp_fec": ("auto", "-1")}, "--udp-fec auto -1: must be auto and at most one number"),
    (UDP | {"udp_fec": ("auto", "2", "5")}, "--udp-fec auto 2 5: must be auto and at most one number"),
    (STREAM | {"udp_deadline": "soon"}, "--udp-deadline soon: must be off, auto or milliseconds above 0"),
    (STREAM | {"udp_deadline": "0"}, "--udp-deadline 0: must be off, auto or milliseconds above 0"),
    (STREAM | {"udp_deadline": "auto:0.4"}, "--udp-deadline auto:0.4: SHARE must be in [0.5, 1]"),
    (STREAM | {"udp_deadline": "auto:x"}, "--udp-deadline auto:x: SHARE must be in [0.5, 1]"),
    (UDP | {"udp_deadline": "auto:0.9"}, "--udp-deadline auto:0.9: must be off, auto or millis"),
    (STREAM | {"packet_copies": (2,)}, "--packet-copies 2: cannot go with --transport stream: TCP sends again"),
    (STREAM | {"udp_rate": "bbr 1gbit"}, "--udp-rate bbr 1gbit: must be one word with --transport stream"),
    (STREAM | {"udp_port": 65536}, "--udp-port 65536: must be in [0, 65535]"),
    (STREAM | {"udp_fec": ("2", "1")}, "--udp-fec 2 1: needs --transport udp"),
    ({"transport": "pieces", "udp_port": 1}, "--udp-port 1: needs --transport udp or stream"),
    (FOUR | {"islands": 0}, "--islands 0: must be at least 1"),
    (FOUR | {"islands": 1, "sync_method": "gradients", "p_sync": 0.1}, "--p-sync 0.1: needs --islands and a"),
    (FOUR | {"sync_method": "gradients", "sync_delay": 3}, "--sync-delay 3: needs --islands and a --sync-method"),
    (FOUR | {"sync_fraction": 0.0}, "--sync-fraction 0.0: must be in (0, 1]"),
    (FOUR | {"sync_fraction": 1.5}, "--sync-fraction 1.5: must be in (0, 1]"),
    (FOUR | {"sync_fraction": float("nan")}, "--sync-fraction nan: must be in (0, 1]"),
    (FOUR | {"sync_interval": 0}, "--sync-interval 0: must be at least 1"),
    (FOUR | {"sync_delay": -1}, "--sync-delay -1: must be at least 0"),
    (FOUR | {"sync_block": 0}, "--sync-block 0: must be at least 1"),
    (FOUR | {"delay_correction": "mixing:2"}, "--delay-correction mixing:2: must be mixing:A, with A in (0, 2)"),
    (FOUR | {"delay_correction": "mixing:fast"}, "--delay-correction mixing:fast: must be mixing:A, with A in"),
    (FOUR | {"delay_correction": "ema:0.0,0.1,1000"}, "--delay-correction ema:0.0,0.1,1000: must be ema:FIRST"),
    (FOUR | {"delay_correction": "none:1"}, "--delay-correction none:1: must be one of none, ema, mixing, smith"),
    (FOUR | EAGER | {"sync_fraction": 0.5}, "--sync-fraction 0.5: needs --islands and a --sync-method of parameters"),
    (FOUR | HALVES | {"sync_delay": 4}, "--sync-delay 4: must be below 4, after which an element is sent again, with"),
    (FOUR | HALVES | {"sync_delay": 2, "sync_subset": "partition"}, "--sync-delay 2: must be below 2, after which an"),
    (FOUR | EAGER | {"sync_delay": 2, "sync_interval": 4}, "--sync-delay 2: must be --sync-interval 4"),
    (FOUR | {"outer_optimizer": (0.5, 0.9)}, "--outer-optimizer 0.5 0.9: needs --sync-method diloco or eager-diloco"),
    (FOUR | {"sync_method": "diloco", "delay_correction": "ema"}, "--delay-correction ema: needs --islands and"),
    (FOUR | {"island_speeds": (1.0, 2.0)}, "--island-speeds 1.0 2.0: must be 4 positive numbers, one per island"),
    (FOUR | {"island_speeds": (1.0, 2.0, 0.0, 1.0)}, "--island-speeds 1.0 2.0 0.0 1.0: must be 4 positive numbers"),
    (FOUR | {"island_speeds": (1.0, 1.5, 1.0, 1.0)}, "--island-speeds 1.5 of 1.0 1.5 1.0 1.0: gives an island 1.5"),
    (FOUR | {"p_sync": 1.0}, "--p-sync 1.0: must be in [0, 1)"),
    (FOUR | {"param_send": "compensated"}, "--param-send compensated: cannot be combined with --islands"),
    (FOUR | {"loss_model": ("per-link:rates",), "p_sync": 0.1}, "--p-sync 0.1: cannot be combined with --loss-model"),
]


@pytest.mark.parametrize(("flags", "line"), REFUSED, ids=lambda value: str(value)[:60])
def test_flags_that_do_not_fit(flags, line):
    with pytest.raises(UsageError) as error:
        LossyConfig(**flags)
    assert str(error.value).startswith(line) and "\n" not in str(error.value)


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
