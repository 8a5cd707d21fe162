"""``python -m megatron_lossy SCRIPT …``: what users see when they are wrong, and that SCRIPT runs as under Python."""

import os
import subprocess
import sys

import numpy as np
import pytest

from megatron_lossy.config import LossyConfig
from megatron_lossy.errors import UsageError
from megatron_lossy.hooks import check_version
from megatron_lossy.hooks.checks import check_arguments
from megatron_lossy.ledger import Ledger, Patch


def launch(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "megatron_lossy", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "usage: python -m megatron_lossy SCRIPT"),
        (["absent.py"], "SCRIPT absent.py: must be a Python file"),
        ([__file__, "--p-grad", "1.5"], "--p-grad 1.5: must be in [0, 1)"),
        ([__file__, "--p-grad", "nan"], "--p-grad nan: must be in [0, 1)"),
        ([__file__, "--p-grad", "much"], "argument --p-grad: invalid float value: 'much'"),
        ([__file__, "--loss-unit", "byte"], "--loss-unit: invalid choice: 'byte'"),
        ([__file__, "--loss-model", "trace", "--trace", "absent.npz"], "--trace absent.npz"),
    ],
)
def test_one_line_and_status_2(arguments, named):
    done = launch(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert done.stderr.count("\n") == 1 and not done.stdout


def test_files_are_checked_against_world_size_and_length(tmp_path):
    matrix, trace = tmp_path / "matrix.txt", tmp_path / "trace.npz"
    np.savetxt(matrix, np.zeros((2, 2)))
    np.savez(trace, grad=np.ones((5, 4, 4, 1), dtype=bool), param=np.ones((5, 4, 4, 1), dtype=bool))
    done = launch(__file__, "--loss-model", "per-link", "--link-rates-grad", matrix, WORLD_SIZE="4")
    assert done.returncode == 2 and "is 2 x 2, but the dense group has 4 ranks" in done.stderr
    flags = ["--loss-model", "trace", "--trace", trace, "--train-iters", "6"]
    done = launch(__file__, *flags, WORLD_SIZE="4")
    assert done.returncode == 2 and "has 5 steps in phase grad, the run needs 6" in done.stderr
    done = launch(__file__, *flags, "--tensor-model-parallel-size", "2", WORLD_SIZE="4")
    assert done.returncode == 2 and "is of 4 ranks, but the group has 2" in done.stderr


def test_another_rank_leaves_the_line_to_the_first(tmp_path):
    """It waits for the launcher to end it; alone, it speaks for itself in the end."""
    done = launch(__file__, "--p-grad", "2", LOCAL_RANK="1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1


def test_a_script_without_megatron_training_is_refused(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    done = launch(script, "--p-grad", "0.1")
    assert done.returncode == 2
    assert "megatron.core and megatron.training must be importable" in done.stderr.splitlines()[-1]
    assert "ran" not in done.stdout


@pytest.mark.parametrize("version", ["0.10.0", "0.21.0", "1.0", "unknown"])
def test_unsupported_versions_are_named(version):
    with pytest.raises(UsageError, match=version):
        check_version(version)
    check_version("0.16.1")


class Arguments:
    use_distributed_optimizer = True
    optimizer = "adam"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_distributed_optimizer", False),
        ("use_megatron_fsdp", True),
        ("optimizer", "dist_muon"),
        ("optimizer_cuda_graph", True),
        ("reuse_grad_buf_for_mxfp8_param_ag", True),
        ("cuda_graph_scope", ["full_iteration"]),
        ("fp8_param_gather", True),
        ("check_weight_hash_across_dp_replicas_interval", 10),
    ],
)
def test_settings_that_cannot_be_right_are_refused(name, value):
    arguments = Arguments()
    check_arguments(arguments, LossyConfig(p_param=0.1))
    setattr(arguments, name, value)
    check_arguments(arguments, LossyConfig())  # without loss nobody minds
    with pytest.raises(UsageError, match="--" + name.replace("_", "-")):
        check_arguments(arguments, LossyConfig(p_param=0.1))


# --- the ledger ----------------------------------------------------------------------------------------------------


class Target:
    kept = 1

    def method(self):
        return 2


def patch(target, value, **options):
    return Patch(f"{__name__}:Target.{target}", lambda original: value, "test", "all", "never", **options)


def test_installing_is_all_or_nothing():
    ledger = Ledger("test")
    with pytest.raises(UsageError, match="absent"):
        ledger.install([patch("kept", 5), patch("absent", 6)])
    assert Target.kept == 1 and not ledger.installed
    ledger.install([patch("kept", 5), patch("absent", 6, optional=True), patch("new", 7, create=True)])
    assert (Target.kept, Target.new) == (5, 7)
    assert "Target.kept" in ledger.report() and "absent" not in ledger.report()
    ledger.uninstall()
    assert Target.kept == 1 and not hasattr(Target, "new")


def test_a_later_patch_is_not_clobbered():
    ledger = Ledger("test")
    original = Target.__dict__["method"]
    ledger.install([patch("method", lambda self: 3)])
    ours = Target.__dict__["method"]
    Target.method = lambda self: 4
    with pytest.raises(RuntimeError, match="something else replaced it"):
        ledger.uninstall()
    Target.method = ours
    ledger.uninstall()
    assert Target.__dict__["method"] is original
