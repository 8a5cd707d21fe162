"""Commands and modules that have another name now: the old one works, and says what the new one is."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("old", "said", "printed"),
    [
        (
            ["megatron_lossy.report", "study", "configs/studies/unit.yaml", "--list"],
            "python -m megatron_lossy.report study is python -m megatron_lossy.study FILE.yaml now",
            "seed 1",
        ),
        (
            ["megatron_lossy.report", "table1", "--help"],
            "python -m megatron_lossy.report table1 is python -m megatron_lossy.study table1 now",
            "usage: python -m megatron_lossy.study table1",
        ),
        (
            ["megatron_lossy.train.sweep", "--help"],
            "python -m megatron_lossy.train.sweep is python -m megatron_lossy.study sweep now",
            "usage: python -m megatron_lossy.study sweep",
        ),
        (
            ["megatron_lossy.log", "--help"],
            "python -m megatron_lossy.log is python -m megatron_lossy.delivery_log now",
            "usage: python -m megatron_lossy.delivery_log",
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_an_old_command_works_and_names_the_new_one(old, said, printed):
    command = [sys.executable, "-m", *old]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [said] and printed in done.stdout


def test_a_wrong_old_command_ends_as_the_new_one_does():
    command = [sys.executable, "-m", "megatron_lossy.report", "study", "no_such_file.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 2 and "no_such_file.yaml" in done.stderr


def test_the_old_module_of_collectives():
    import megatron_lossy.collectives as old
    from megatron_lossy import transport

    with pytest.warns(DeprecationWarning, match="megatron_lossy.transport now"):
        assert old.lossy_reduce_scatter is transport.lossy_reduce_scatter
    with pytest.warns(DeprecationWarning), pytest.raises(AttributeError):
        old.no_such_name  # noqa: B018
