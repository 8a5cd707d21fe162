"""``python -m megatron_lossy doctor``."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lossy.doctor import Finding, ready, report
from megatron_lossy.doctor.found import apex
from tests.programs import run_program

ROOT = Path(__file__).parents[1]


def doctor(*arguments, command=("doctor",), cwd=ROOT):
    return subprocess.run(
        [sys.executable, "-m", "megatron_lossy", *command, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )


def test_this_machine_is_ready():
    """What the tests need is what the doctor looks for, and a lossy step on two processes works."""
    done = run_program("megatron_lossy", "doctor", "--json", "--step", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["ready"]
    by_name = {finding["name"]: finding for finding in found["findings"]}
    for name in ("python", "torch", "megatron-core", "gloo", "megatron.core"):
        assert by_name[name]["status"] == "ok"
    assert by_name["NVIDIA Apex"]["status"] in ("absent", "ok")
    step = by_name["gloo, cpu"]
    assert step["status"] == "ok" and "3 iterations on 2 processes" in step["text"]


def test_a_megatron_that_is_too_old_is_a_problem(tmp_path):
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").write_text('__version__ = "0.5.0"\n')
    done = doctor("--megatron-lm", tmp_path)
    assert done.returncode == 1 and done.stdout.endswith("ready: no\n")
    assert "PROBLEM  megatron-core             megatron-core 0.5.0: is not supported" in done.stdout
    assert f"{tmp_path} has no pretrain_gpt.py" in done.stdout
    assert "not tried, because of the problems above" in done.stdout


def test_what_megatron_lm_imports_is_one_extra(tmp_path):
    for name, text in (("core", '__version__ = "0.16.1"\n'), ("training", "import six_of_nobody\n")):
        (tmp_path / "megatron" / name).mkdir(parents=True)
        (tmp_path / "megatron" / name / "__init__.py").write_text(text)
    (tmp_path / "pretrain_gpt.py").touch()
    done = doctor("--megatron-lm", tmp_path)
    assert done.returncode == 1 and "No module named 'six_of_nobody'" in done.stdout
    assert "comes with the extra megatron-lm of this package: pip install -e '.[megatron-lm]'" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--megatron-lm", "absent"], "--megatron-lm absent: must be a checkout of Megatron-LM"),
        (["--step", "gpu"], "--step: invalid choice: 'gpu'"),
    ],
)
def test_wrong_flags_are_one_line(arguments, message):
    done = doctor(*arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_a_script_may_be_called_doctor(tmp_path):
    (tmp_path / "doctor").write_text("print('ran')")
    done = doctor("--p-grad", "2", command=("./doctor",), cwd=tmp_path)
    assert done.returncode == 2 and "--p-grad 2.0: must be in [0, 1)" in done.stderr


def test_nvidias_apex_is_told_from_pypis(tmp_path, monkeypatch):
    if "apex" in sys.modules or apex().status != "absent":
        pytest.skip("an Apex is installed")
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex/__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    assert apex().status == "warning" and "PyPI's" in apex().text
    (tmp_path / "apex/multi_tensor_apply").mkdir()
    assert "without its CUDA extensions" in apex().text
    (tmp_path / "amp_C.py").touch()
    importlib.invalidate_caches()
    assert apex().status == "ok"


def test_only_problems_stand_in_the_way():
    findings = [Finding("versions", "a", status, "text") for status in ("ok", "absent", "warning")]
    assert ready(findings) and report(findings).endswith("ready: yes")
    assert not ready([*findings, Finding("hooks", "b", "problem", "text")])
