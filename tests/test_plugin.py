"""``python -m megatron_lossy SCRIPT …``: what users see when they are wrong, and that SCRIPT runs as under Python."""

import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.plugin import _nothing_lost, check_command_line

pytestmark = pytest.mark.shows("`python -m megatron_lossy SCRIPT`: one line for what is wrong", device=False)


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_lossy", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


@pytest.fixture(scope="module")
def another_rank():
    """A rank that is not the first of its node. It waits for five seconds, which the next test uses."""
    process = start(__file__, "--p-grad", "2", LOCAL_RANK="1")
    yield process
    process.kill()
    process.communicate()


def test_a_run_that_loses_nothing_says_whether_it_was_asked():
    """Rates of 0 are no slip; flags that a script never got are one."""
    said = "loss: none, the exchanges are Megatron's own"
    asked = ["--train-iters", "5", "--p-grad", "0", "--p-param", "0"]
    assert _nothing_lost(LossyConfig(), asked) == said
    assert _nothing_lost(LossyConfig(), asked[:2]) == f"{said}; no loss flag was given"


def test_files_are_checked_against_world_size_and_length(rows, tmp_path):
    matrix, trace = tmp_path / "matrix.txt", tmp_path / "trace.npz"
    np.savetxt(matrix, np.zeros((2, 2)))
    np.savez(trace, grad=np.ones((5, 4, 4, 1), dtype=bool), param=np.ones((5, 4, 4, 1), dtype=bool))
    done = rows.run("megatron_lossy", __file__, "--loss-model", f"per-link:{matrix}", WORLD_SIZE=4)
    assert done.returncode == 2 and "is 2 x 2, but the dense group has 4 ranks" in done.stderr
    flags = ["--loss-model", "trace", "--trace", trace, "--train-iters", "6"]
    done = rows.run("megatron_lossy", __file__, *flags, WORLD_SIZE=4)
    assert done.returncode == 2 and "has 5 steps in phase grad, the run needs 6" in done.stderr
    done = rows.run("megatron_lossy", __file__, *flags, "--tensor-model-parallel-size", "2", WORLD_SIZE=4)
    assert done.returncode == 2 and "is of 4 ranks, but the group has 2" in done.stderr


def test_sizes_that_megatron_reads_from_a_file_are_left_to_it(tmp_path, monkeypatch):
    """A trace of two ranks is refused for four, but fits if a checkpoint says that they are tensor parallel."""
    arrived = np.ones((5, 2, 2, 1), dtype=bool)
    np.savez(tmp_path / "trace.npz", grad=arrived, param=arrived)
    config = LossyConfig(loss_model=("trace",), trace=str(tmp_path / "trace.npz"))
    monkeypatch.setenv("WORLD_SIZE", "4")
    length = ["--train-iters", "5"]
    with pytest.raises(UsageError, match="is of 2 ranks, but the group has 4"):
        check_command_line(config, length)
    assert check_command_line(config, [*length, "--use-checkpoint-args"]) == 5
    assert check_command_line(config, [*length, "--use-mp-args-from-checkpoint-args"]) == 5
    assert check_command_line(config, [*length, "--yaml-cfg", "run.yaml"]) is None


def test_a_script_without_megatron_training_is_refused(another_rank, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    process = start(script, "--p-grad", "0.1")
    stdout, stderr = process.communicate(timeout=120)
    assert process.returncode == 2
    assert "megatron.core and megatron.training must be importable" in stderr.splitlines()[-1]
    assert "ran" not in stdout


def test_another_rank_leaves_the_line_to_the_first(another_rank):
    """It waits for the launcher to end it; alone, it speaks for itself in the end."""
    _, stderr = another_rank.communicate(timeout=120)
    assert another_rank.returncode == 2 and stderr.count("\n") == 1
