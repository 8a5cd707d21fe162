"""Islands under ``megatron.training``: of the unmodified pretrain_gpt.py of a checkout of Megatron-LM, and what needs none.

pytest tests/test_islands_megatron_lm.py --megatron-lm=/path/to/Megatron-LM      (about two minutes)
"""

import os
import re
import signal
import subprocess
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.config import LossyConfig
from megatron_lossy.hooks.megatron_training import _weights_alone
from megatron_lossy.mechanisms.islands import megatron_training as island_training
from megatron_lossy.mechanisms.islands.ranks import RankIslands
from tests.test_plugin_megatron_lm import ENVIRONMENT, MODEL, TORCHRUN, pretrain

pytestmark = [
    pytest.mark.shows("islands of the unmodified `pretrain_gpt.py`: by value, resumed, stopped"),
    pytest.mark.timeout(600),
]

AVERAGED = ["--islands", 2, "--sync-method", "parameters"]
LATE = [*AVERAGED, "--sync-fraction", 0.25, "--sync-delay", 3]
# With an epsilon that dwarfs the second moment, Adam is gradient descent with momentum, to the last bit.
DESCENT = ["--lr", 2.0**40 * 0.1, "--adam-eps", 2.0**40, "--adam-beta1", 0.5, "--weight-decay", 0, "--clip-grad", 0]


def losses(lines):
    """By iteration, the training losses of all islands; and the validation losses."""
    train, valid = defaultdict(list), defaultdict(list)
    for line in lines:
        number = int(re.search(r"iteration +(\d+)", line)[1])
        found = train if "nan iterations" in line else valid
        found[number].append(float(re.search(r"lm loss(?: value)?: ([\d.E+-]+)", line)[1]))
    return train, valid


@pytest.mark.megatron_lm
def test_averaged_weights_of_gradient_descent_are_averaged_gradients(megatron_lm):
    """So each island has its part of the data, in training and evaluation, and all of an update is averaged."""
    whole, done = pretrain(megatron_lm, *DESCENT)
    assert done.returncode == 0, done.stderr[-3000:]
    islands, done = pretrain(megatron_lm, *DESCENT, *AVERAGED, "--global-batch-size", 4)
    assert done.returncode == 0, done.stderr[-3000:]
    (train, valid), (both, same) = losses(whole), losses(islands)
    assert {len(one) for one in both.values()} == {2} and len(both) == len(train) == 20
    assert any(abs(a - b) > 1e-3 for a, b in both.values())  # of other data
    for number, (loss,) in train.items():
        assert sum(both[number]) / 2 == pytest.approx(loss, rel=2e-6), number
    assert valid.keys() == same.keys() and len(set(train[20]) - set(train[1])) == 1
    for number, values in valid.items():
        assert same[number] == pytest.approx([value for value in values for _ in range(2)], rel=2e-6), number
    assert "data-parallel ranks 2\n" in done.stdout and "sync wait" in done.stdout


@pytest.mark.megatron_lm
def test_a_resumed_run_equals_an_uninterrupted_one(megatron_lm, tmp_path):
    """Two islands of two ranks, which lose inside and between, with exchanges under way."""
    flags = [*LATE, "--p-sync", 0.3, "--p-grad", 0.3, "--p-param", 0.3, "--save-replicas", "--overlap-grad-reduce"]
    flags += ["--overlap-param-gather", "--eval-weights", "both", "--ckpt-format", "torch_dist", "--save-interval", 10]
    whole, done = pretrain(megatron_lm, *flags, "--save", tmp_path / "whole", "--save-consensus", ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "whole" / "consensus" / "iter_0000020").is_dir()
    mean = ["--load", tmp_path / "whole" / "consensus", "--finetune", "--train-iters", 1, "--lr-decay-iters", 1]
    lines, done = pretrain(megatron_lm, *mean)
    assert "lm loss: " in lines[0] and "successfully loaded checkpoint" in done.stdout, done.stderr[-3000:]
    after, before = (float(re.search(r"lm loss: ([\d.E+-]+)", one)[1]) for one in (lines[0], whole[0]))
    assert after < before - 0.01  # what was learned is there
    parts = ["--save", tmp_path / "parts", "--load", tmp_path / "parts"]
    _, done = pretrain(megatron_lm, *flags, *parts, "--exit-interval", 10, ranks=4)
    assert (tmp_path / "parts" / "island_1" / "iter_0000010").is_dir(), done.stderr[-3000:]
    resumed, done = pretrain(megatron_lm, *flags, *parts, ranks=4)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "(consensus weights)" in resumed[-1]
    # Megatron's first line after a resume stays in the mean that the second one reports: compare from the third on.
    for number in range(13, 21):
        mine, there = (sorted(one for one in lines if f" {number}/" in one) for lines in (resumed, whole))
        assert len(mine) == 2 and mine == there, number


@pytest.mark.megatron_lm
def test_a_signal_to_one_rank_ends_all_islands_after_the_same_iteration(megatron_lm, tmp_path):
    """Two islands of a rank; what they exchange loses half of its packets."""
    flags = [*MODEL, *LATE, "--p-sync", "0.5", "--exit-signal-handler", "--save", tmp_path, "--save-interval", 5000]
    flags += ["--ckpt-format", "torch_dist", "--train-iters", 2000]
    run = [
        *TORCHRUN,
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "megatron_lossy",
        os.path.join(megatron_lm, "pretrain_gpt.py"),
        *map(str, flags),
    ]
    environment = ENVIRONMENT | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment) as done:
        text = ""
        for line in done.stdout:
            text += line
            if re.search(r"iteration +5/", line) and "told" not in text:
                text += "told\n"
                ranks = Path(f"/proc/{done.pid}/task/{done.pid}/children").read_text().split()
                os.kill(int(ranks[-1]), signal.SIGTERM)
    found = {latest_iteration(tmp_path / f"island_{number}") for number in range(2)}
    assert done.returncode == 0 and len(found) == 1 and 5 <= found.pop() < 2000, text[-3000:]


@pytest.mark.megatron_lm
def test_what_cannot_be_right_is_refused_before_training(megatron_lm, tmp_path):
    for flags, line in (
        (["--islands", 3, "--sync-method", "parameters"], "--islands 3: must divide the 2 data-parallel ranks"),
        ([*LATE, "--exit-duration-in-mins", 5], "--exit-duration-in-mins: cannot go with --islands"),
    ):
        _, done = pretrain(megatron_lm, *flags)
        assert f"error: {line}" in done.stderr and "iteration        1/" not in done.stdout


without = pytest.mark.shows("samples and the mean's checkpoint under `megatron.training`")


def island(number, islands=3):
    return SimpleNamespace(world=SimpleNamespace(island=number, islands=islands))


@without
def test_all_islands_together_read_as_many_times_the_samples_of_one():
    """``None`` is of a split that is not read."""
    assert island_training.number_of_samples(island(1), lambda: (100, None, 7)) == (300, None, 21)


@without
@pytest.mark.parametrize("number", [0, 1, 2])
def test_the_first_island_writes_the_mean_and_no_optimizer(number):
    args = SimpleNamespace(save="/run/island_1", no_save_optim=None, no_save_rng=False, async_save=True)
    before = dict(vars(args))
    flags = LossyConfig(islands=3, sync_method="parameters", save_consensus=True)
    folder, writes = RankIslands(flags, SimpleNamespace(job=(number, 3), island=number, launched_rank=0)).saved_beside(
        args.save
    )
    assert writes is (number == 0)
    with pytest.raises(KeyError), _weights_alone(args, folder):
        assert vars(args) == {
            "save": "/run/consensus", "no_save_optim": True, "no_save_rng": True, "async_save": False,
        }  # fmt: skip
        raise KeyError("a save that fails")
    assert vars(args) == before
