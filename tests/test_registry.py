"""A channel and a recovery rule of somebody else: one file, one line of registration each, used from the command line."""

import os
import re
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import UsageError
from megatron_lossy.flags import flag_table
from megatron_lossy.registry import CHANNELS, GRAD_RECOVERIES, Registry
from tests.trainer import TINY, as_flags, read_records, write_data

pytestmark = pytest.mark.shows("a channel and a rule of another package, from the command line", device=False)

ROOT = Path(__file__).parents[1]

#: The documentation's own example of a rule.
[RULE] = re.findall(r"```python\n(# my_rule.py\n.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)

[PYPROJECT] = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)

#: Its example of a mechanism, in two modules.
ALARM, ALARMS = re.findall(r"```python\n(# my_alarm\w*.py\n.*?)```", (ROOT / "docs/index.md").read_text(), re.DOTALL)

CHANNEL = '''
"""Loses everything between ranks in every other step."""

import numpy as np

from megatron_lossy.channel import Channel


class EveryOther(Channel):
    name = "every-other"

    def delivered(self, exchange, source, destination, units):
        return np.full(units, exchange.step % 2 == 0)
'''

ENTRY_POINTS = """
[megatron_lossy.channel]
every-other = every_other:EveryOther

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
    (folder / "my_alarm.py").write_text(ALARM)
    (folder / "my_alarm_observer.py").write_text(ALARMS)
    (folder / "mine-1.0.dist-info").mkdir()
    (folder / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (folder / "mine-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    return folder


def run(installed, *arguments):
    path = os.pathsep.join([str(installed), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )


def settings_in(tmp_path, workers):
    write_data(0, str(tmp_path))
    return TINY | {
        "data_path": (str(tmp_path / "train"),),
        "valid_data_path": (str(tmp_path / "valid"),),
        "metrics_dir": str(tmp_path / "run"),
        "virtual_workers": workers,
        "train_iters": 4,
        "log_interval": 1,
        "eval_iters": 0,
    }


def test_a_mechanism_has_flags_refusals_and_observers(installed, tmp_path):
    flags = ["--p-grad", 0.5, "--loss-model", "every-other", "bernoulli", "--alarm-above", 0.4]
    done = run(installed, "-m", "megatron_lossy.train", *as_flags(settings_in(tmp_path, 4)), *flags)
    assert done.returncode == 0, done.stderr
    assert [record["alarms"] for record in read_records(tmp_path / "run", "train")] == [0, 1, 1, 2]
    done = run(installed, "-m", "megatron_lossy.train", *as_flags(settings_in(tmp_path / "few", 2)), *flags)
    assert done.returncode == 2 and done.stderr.endswith("--alarm-above 0.4: a share of 2 ranks says little\n")
    table = run(installed, "-m", "megatron_lossy", "refusals", "alarm")
    assert table.returncode == 0 and "fewer than 3 ranks" in table.stdout
    help = run(installed, "-m", "megatron_lossy.train", "--help-loss", "alarm")
    assert help.returncode == 0 and "--alarm-above SHARE" in help.stdout
    tiny = ROOT / "configs/tiny/llama_1m.yaml"
    wrong = run(installed, "-m", "megatron_lossy.train", "--config", tiny, "--alarm-above", "2")
    assert wrong.returncode == 2 and "--alarm-above 2.0: must be in [0, 1)" in wrong.stderr


def test_a_mechanism_that_cannot_be_loaded_is_named(tmp_path):
    (tmp_path / "broken-1.0.dist-info").mkdir()
    (tmp_path / "broken-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    points = "[megatron_lossy.mechanisms]\nbroken = nowhere:Broken\n"
    (tmp_path / "broken-1.0.dist-info" / "entry_points.txt").write_text(points)
    done = run(tmp_path, "-m", "megatron_lossy.train", "--help")
    message = "broken: the entry point nowhere:Broken of megatron_lossy.mechanisms fails (No module named 'nowhere')"
    assert done.returncode and done.stderr.strip().endswith(message), done.stderr


def test_both_are_used_from_the_command_line(installed, tmp_path):
    settings = settings_in(tmp_path, 2)
    flags = ["--p-grad", 0.5, "--loss-model", "every-other", "bernoulli", "--grad-recovery", "half"]
    done = run(installed, "-m", "megatron_lossy.train", *as_flags(settings), *flags)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / "run", "train")
    assert [record["loss rate grad"] for record in records] == [0, 1, 0, 1]
    table = run(installed, "-m", "megatron_lossy.report", tmp_path)
    assert table.returncode == 0 and "g 50 % / p 0 %" in table.stdout, table.stdout + table.stderr


def test_the_readmes_package_can_be_installed(tmp_path):
    source, target = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    (source / "my_rule.py").write_text(RULE)
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "notes.py").touch()  # another file beside it does no harm
    pip = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", target]
    done = run(source, *pip, source)
    assert done.returncode == 0, done.stderr
    rule = "from megatron_lossy.registry import GRAD_RECOVERIES as G; print(G.load('half').__module__)"
    assert run(target, "-c", rule).stdout == "my_rule\n"


def test_what_is_wrong_is_one_line(installed):
    for value, message in (
        ("broken", "broken: the entry point my_rule:Absent of megatron_lossy.recovery fails"),
        (
            "misnamed",
            "misnamed: the entry point my_rule:Half of megatron_lossy.recovery fails (its attribute name must",
        ),
        (
            "none",
            "must be one of renormalize, renormalize-remote, previous, zero, error-feedback, broken, half, misnamed",
        ),
    ):
        code = (
            "from megatron_lossy.config import LossyConfig\n"
            f"from megatron_lossy.errors import usage_errors\nwith usage_errors(): LossyConfig(grad_recovery={value!r})"
        )
        done = run(installed, "-c", code)
        assert done.returncode == 2 and message in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr


def test_names_stand_in_the_class_and_in_the_registry():
    for registry in (CHANNELS, GRAD_RECOVERIES):
        for name in registry.built_in:
            assert registry.load(name).name == name
    table = flag_table(LossyConfig)
    assert "`--grad-recovery {renormalize,renormalize-remote,previous,zero,error-feedback}`" in table
    assert "`--grad-recovery {renormalize,renormalize-remote,previous,zero,error-feedback}`" in table


def test_our_names_cannot_be_taken(monkeypatch):
    """A package that adds a name we have does not replace ours."""
    points = [EntryPoint("zero", "no_module:Zero", "g"), EntryPoint("mine", "no_module:Mine", "g")]
    monkeypatch.setattr("megatron_lossy.registry.entry_points", lambda group: points)
    registry = Registry("g", {"zero": "megatron_lossy.recovery.zero:Zero"})
    assert list(registry) == ["zero", "mine"] and "mine" in registry and "other" not in registry
    assert registry.load("zero").__module__ == "megatron_lossy.recovery.zero"
    with pytest.raises(UsageError, match="mine: the entry point no_module:Mine of g fails"):
        registry.load("mine")


def test_flags_are_checked_where_torch_is_not_installed():
    """The launcher runs on log-in nodes."""
    code = "import sys; sys.modules['torch'] = None; from megatron_lossy.config import LossyConfig as C; "
    code += "[C(p_grad=0.1, grad_recovery=rule) for rule in ('previous', 'zero')]; C(loss_model=('gilbert-elliott',))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
