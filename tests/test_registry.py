"""A channel and a recovery rule of somebody else: one file, one line of registration each, used from the command line."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint

import numpy as np
import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Exchange, Stream
from megatron_lossy.base.registry import CHANNELS, GRAD_RECOVERIES, Registry
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.core import PhaseLoss, Schedule
from scripts.update_docs import flag_table
from tests.trainer import ROOT, TINY, as_flags, read_records, write_data

pytestmark = pytest.mark.shows("a channel and a rule of another package, from the command line", device=False)


def examples(module):
    """The documentation's own examples in Python whose name is like ``module``."""
    return re.findall(rf"```python\n(# {module}.py\n.*?)```", PAGE, re.DOTALL)


PAGE = (ROOT / "docs/extending.md").read_text()
[RULE], [WAVES], [PART] = examples("my_rule"), examples("my_loss"), examples("my_part")
[PYPROJECT] = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)

#: Its example of a mechanism, in two modules.
ALARM, ALARMS = examples(r"my_alarm\w*")

CHANNEL = '''
"""Loses everything between ranks in every other step."""

import numpy as np

from megatron_lossy.channel import Channel


class EveryOther(Channel):
    name = "every-other"

    def delivered_links(self, exchange, sources, destinations, units):
        return np.full((len(sources), units), exchange.step % 2 == 0)
'''

ENTRY_POINTS = """
[megatron_lossy.channel]
every-other = every_other:EveryOther
waves = my_loss:Waves

[megatron_lossy.recovery]
half = my_rule:Half
broken = my_rule:Absent
misnamed = my_rule:Half

[megatron_lossy.mechanisms]
alarm = my_alarm:Alarm
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder for PYTHONPATH with a package that adds both, as pip would install it."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "my_rule.py").write_text(RULE)
    (folder / "every_other.py").write_text(CHANNEL)
    (folder / "my_loss.py").write_text(WAVES)
    (folder / "my_alarm.py").write_text(ALARM)
    (folder / "my_alarm_observer.py").write_text(ALARMS)
    distribution(folder, "mine", ENTRY_POINTS)
    return folder


def distribution(folder, name, entry_points):
    """Write the files that pip would install of a package ``name``."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def run(installed, *arguments, status=0):
    """A program that has ended with this status."""
    path = os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT, env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done


def line(installed, *arguments):
    """The one line of a program that refuses."""
    done = run(installed, *arguments, status=2)
    assert len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


def trained(installed, settings, *flags, status=0):
    return run(installed, "-m", "megatron_lossy.train", *as_flags(settings), *flags, status=status)


def settings_in(tmp_path, workers):
    write_data(0, str(tmp_path))
    data = {"data_path": (str(tmp_path / "train"),), "valid_data_path": (str(tmp_path / "valid"),)}
    run = {"metrics_dir": str(tmp_path / "run"), "train_iters": 4, "log_interval": 1, "eval_iters": 0}
    return TINY | data | run | {"virtual_workers": workers}


def test_a_mechanism_has_flags_refusals_and_observers(installed, tmp_path):
    flags = ["--p-grad", 0.5, "--loss-model", "every-other", "bernoulli", "--alarm-above", 0.4]
    trained(installed, settings_in(tmp_path, 4), *flags)
    assert [record["alarms"] for record in read_records(tmp_path / "run", "train")] == [0, 4, 0, 4]
    few = trained(installed, settings_in(tmp_path / "few", 2), *flags, status=2)
    assert few.stderr.endswith("--alarm-above 0.4: needs 3 ranks or more\n")
    assert "fewer than 3 ranks" in run(installed, "-m", "megatron_lossy", "refusals", "alarm").stdout
    assert "--alarm-above SHARE" in run(installed, "-m", "megatron_lossy.train", "--help-loss", "alarm").stdout
    tiny = {"config": ROOT / "configs/tiny/llama_1m.yaml"}
    assert "--alarm-above 2.0: must be in [0, 1)" in trained(installed, tiny, "--alarm-above", 2, status=2).stderr


def test_the_pages_loss_model_draws_at_its_rates(installed, monkeypatch):
    monkeypatch.syspath_prepend(str(installed))
    from my_loss import Waves

    network = Waves(PhaseLoss("waves", Schedule((0,), (0.3,))), 7)
    lost = [
        1 - network.delivered_links(Exchange("grad", Stream(), step), np.array([0]), np.array([1]), 20_000).mean()
        for step in (0, 15, 47)
    ]
    assert lost == pytest.approx([0.3 * (1 + np.sin(step / 10)) for step in (0, 15, 47)], abs=0.02)


def test_its_metrics_are_the_same_on_real_ranks(installed, tmp_path):
    flags = ["--p-grad", 0.4, "--loss-unit", "packet", "--packet-bytes", 256, "--alarm-above", 0.4]
    virtual, real = settings_in(tmp_path / "virtual", 4), settings_in(tmp_path / "real", None)
    trained(installed, virtual, *flags)
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 4, "-m", "megatron_lossy.train"]
    run(installed, *ranks, *as_flags({k: v for k, v in real.items() if v is not None}), *flags)
    alarms = [
        [record["alarms"] for record in read_records(tmp_path / kind / "run", "train")] for kind in ("virtual", "real")
    ]
    assert alarms[0] == alarms[1] and 0 < sum(alarms[0]) < 4 * 4


def test_a_part_goes_on_where_its_run_was_saved(tmp_path):
    """The page's part, which a mechanism of two lines returns."""
    place = tmp_path / "site"
    place.mkdir()
    (place / "my_part.py").write_text(PART)
    returns = "    @classmethod\n    def attach(cls, run):\n        from my_part import Updates\n        run.add_part(Updates())\n"
    shows = (
        "    @classmethod\n    def observers(cls, run, writer):\n        from my_monitor import Shown\n"
        "        return [Shown(run)]\n"
    )
    (place / "my_monitor.py").write_text(
        "from megatron_lossy.run.monitor import Observer\n\nclass Shown(Observer):\n    def __init__(self, run):\n"
        "        self.run = run\n    def metrics(self):\n        return {'updates': self.run.part('updates').count}\n"
    )
    broken_mechanism(place, MECHANISM + returns + shows)
    saves = ["--save", tmp_path / "saved", "--save-interval", 2]
    for iterations, more in ((2, saves), (4, ["--load", tmp_path / "saved"])):
        settings = settings_in(tmp_path / str(iterations), 4) | {"train_iters": iterations, "lr_decay_iters": 4}
        trained(place, settings, "--p-param", 0.3, "--save-replicas", *more)
    assert [record["updates"] for record in read_records(tmp_path / "4" / "run", "train")] == [3, 4]


MECHANISM = """
from dataclasses import dataclass
from megatron_lossy.base.flags import flag
from megatron_lossy.run.mechanism import Mechanism
from megatron_lossy.base.section import Flags

@dataclass(frozen=True)
class F(Flags):
    mine: float = flag(0.0, "a number")

class Broken(Mechanism):
    name = "broken"
    Flags = F
"""
PHASES = "grad 0, param 1, sync-reduce 4, sync-gather 5, act 2, act-grad 3"
CORE = "megatron_lossy.config.core.CoreFlags"
#: Faults of a mechanism: its module, and the reason in the message.
WRONG = {
    "module": (None, "No module named 'broken'"),
    "syntax": (MECHANISM + "class", "SyntaxError: invalid syntax (broken.py, line 14)"),
    "import": (MECHANISM + "1 / 0", "ZeroDivisionError: division by zero"),
    "name": (MECHANISM.replace('"broken"', '"other"'), "its attribute name must be 'broken'"),
    "flags": (
        MECHANISM.replace("    Flags = F", ""),
        "its attribute Flags must be a subclass of megatron_lossy.base.section.Flags",
    ),
    "default": (
        MECHANISM.replace('flag(0.0, "a number")', "0.0").replace(" = 0.0", ""),
        "mine of its attribute Flags must have a default",
    ),
    "number": (MECHANISM + '    phases = {"mine": 4}', f"the phase 'mine' with number 4 is taken: there are {PHASES}"),
    "flag": (MECHANISM.replace("mine", "p_grad"), f"--p-grad of broken.F is taken by {CORE}"),
    "verb": (MECHANISM.replace("mine", "ranks_of_node"), f"ranks_of_node of broken.F is taken by {CORE}"),
    "config": (MECHANISM.replace("mine", "model"), "model of broken.F is taken by LossyConfig"),
}


def broken_mechanism(folder, source):
    distribution(folder, "broken", "[megatron_lossy.mechanisms]\nbroken = broken:Broken\n")
    if source is not None:
        (folder / "broken.py").write_text(source)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_mechanism_that_does_not_fit_is_one_line(wrong, tmp_path):
    source, why = WRONG[wrong]
    broken_mechanism(tmp_path, source)
    done = run(tmp_path, "-m", "megatron_lossy.train", "--help", status=2)
    what = f"broken: the entry point broken:Broken of megatron_lossy.mechanisms fails ({why})"
    assert done.stderr == f"megatron_lossy.train: error: {what}\n"


@pytest.mark.parametrize("program", ["megatron_lossy", "megatron_lossy.report", "megatron_lossy.launch"])
def test_every_program_names_it(program, tmp_path):
    broken_mechanism(tmp_path, None)
    assert "broken:Broken" in line(tmp_path, "-m", program, "runs")


def test_no_run_is_without_it(tmp_path):
    broken_mechanism(tmp_path, None)
    code = "from megatron_lossy.config import LossyConfig; LossyConfig()"
    assert "UsageError: broken: the entry point broken:Broken" in run(tmp_path, "-c", code, status=1).stderr


def test_a_phase_of_a_mechanism_takes_its_own_channel_and_schedule(tmp_path):
    phase = '    triggers = None\n    rates = {"mine": "mine"}\n    def exchanges(self):\n        return ("mine",)\n'
    source = MECHANISM.replace('"a number")\n', '"a number")\n' + phase) + '    phases = {"mine": 9}\n'
    broken_mechanism(tmp_path, source)
    code = (
        "from megatron_lossy.config import LossyConfig\n"
        "config = LossyConfig(mine=0.1, loss_model=('bernoulli', 'bernoulli', 'gilbert-elliott:8'))\n"
        "print(config.phase('mine').burst, config.phase('param').burst, config.label('mine'))\n"
        "config = LossyConfig(loss_schedule=('0:0.1', '0:0.2', '0:0.3'))\n"
        "print(config.phase('mine').schedule.rates, config.label('param'))"
    )
    done = run(tmp_path, "-c", code)
    assert done.stdout == "8.0 None 10 %\n(0.3,) 0:0.2\n", done.stderr


@pytest.mark.nightly  # it makes every page
def test_our_pages_have_nothing_of_other_packages(installed):
    run(installed, "-m", "scripts.update_docs", "--check")


def test_a_flag_that_a_program_has_is_one_line(tmp_path):
    broken_mechanism(tmp_path, MECHANISM.replace("mine", "lr"))
    message = "megatron_lossy.train: error: --lr: broken.F has it, and so has the group 'training'"
    assert line(tmp_path, "-m", "megatron_lossy.train", "--help").startswith(message)


def test_both_are_used_from_the_command_line(installed, tmp_path):
    flags = ["--p-grad", 0.5, "--loss-model", "every-other", "bernoulli", "--grad-recovery", "half"]
    trained(installed, settings_in(tmp_path, 2), *flags)
    records = read_records(tmp_path / "run", "train")
    assert [record["loss rate grad"] for record in records] == [0, 1, 0, 1]
    table = run(installed, "-m", "megatron_lossy.report", tmp_path)
    assert "g 50 % / p 0 %" in table.stdout, table.stdout + table.stderr


def test_the_readmes_package_can_be_installed(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "my_rule.py").write_text(RULE)
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "notes.py").touch()  # another file next to it does no harm
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target]
    run(source, *pip, source)
    rule = "from megatron_lossy.base.registry import GRAD_RECOVERIES as G; print(G.load('half').__module__)"
    assert run(target, "-c", rule).stdout == "my_rule\n"


def test_what_is_wrong_is_one_line(installed):
    ours = "renormalize, renormalize-remote, previous, zero, error-feedback"
    for value, message in (
        ("broken", "the entry point my_rule:Absent of megatron_lossy.recovery fails"),
        ("misnamed", "the entry point my_rule:Half of megatron_lossy.recovery fails (its attribute name must"),
        ("none", f"must be one of {ours}, broken, half, misnamed"),
    ):
        code = (
            "from megatron_lossy.config import LossyConfig\n"
            f"from megatron_lossy.base.errors import usage_errors\nwith usage_errors(): LossyConfig(grad_recovery={value!r})"
        )
        assert message in line(installed, "-c", code)


def test_names_stand_in_the_class_and_in_the_registry():
    for registry in (CHANNELS, GRAD_RECOVERIES):
        for name in registry.built_in:
            assert registry.load(name).name == name
    table = flag_table(LossyConfig)
    assert "`--grad-recovery {renormalize,renormalize-remote,previous,zero,error-feedback}`" in table


def test_our_names_cannot_be_taken(monkeypatch):
    """A package that adds a name we have does not replace ours."""
    points = [EntryPoint("zero", "no_module:Zero", "g"), EntryPoint("mine", "no_module:Mine", "g")]
    monkeypatch.setattr("megatron_lossy.base.registry.entry_points", lambda group: points)
    registry = Registry("g", {"zero": "megatron_lossy.recovery.base:Zero"})
    assert list(registry) == ["zero", "mine"] and "mine" in registry and "other" not in registry
    assert registry.load("zero").__module__ == "megatron_lossy.recovery.base"
    with pytest.raises(UsageError, match="mine: the entry point no_module:Mine of g fails"):
        registry.load("mine")


def test_flags_are_checked_where_torch_is_not_installed():
    """The launcher runs on log-in nodes."""
    code = "import sys; sys.modules['torch'] = None; from megatron_lossy.config import LossyConfig as C; "
    code += "[C(p_grad=0.1, grad_recovery=rule) for rule in ('previous', 'zero')]; C(loss_model=('gilbert-elliott',))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
