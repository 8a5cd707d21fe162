"""Islands of unequal numbers of ranks, as programs: their mean by value, and an island that comes back with fewer."""

from __future__ import annotations

import re
import signal

import numpy as np
import pytest

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.lab.train.data import RankBatches
from tests.programs import run_program
from tests.test_islands_apart import MODEL, Run
from tests.trainer import TINY, as_flags, checkpoint_bytes

pytestmark = [
    pytest.mark.shows("islands of 2 and 3 ranks: mean, and a return with fewer"),
    pytest.mark.programs,
]

TWO = {"islands": 2, "sync_method": "parameters"}
TRAINED = MODEL | {"global_batch_size": 12, "hidden_dropout": 0.0}
SGD = {"optimizer": "sgd", "sgd_momentum": 0.5, "lr": 0.5, "lr_warmup_iters": 0}


def weights(folder):
    found = checkpoint_bytes(folder, latest_iteration(folder))
    kept = {name: value for name, value in found.items() if not name.startswith(("optimizer", "rng"))}
    assert len(kept) > 5
    return {name: np.frombuffer(value, np.float32) for name, value in kept.items()}


def started(server, settings, *ranks):
    """Start an island of each number of ``ranks``."""
    run = Run(server, TRAINED | TWO | settings)
    for slot, number in enumerate(ranks):
        run.ranks = number
        run.start(slot)
    return run


@pytest.mark.parametrize("sync_ranks", [1, 2])
def test_the_mean_of_islands_of_2_and_3_ranks_is_that_of_their_weights(data, tmp_path, serve, sync_ranks):
    """One iteration of descent, of which the samples of an island are a part of the batch, however many ranks it has."""
    settings = data | SGD | {"train_iters": 1, "save_replicas": True}
    alone = (
        TRAINED | settings | {"islands": 2, "sync_method": "none", "micro_batch_size": 3, "save": tmp_path / "alone"}
    )
    once = run_program("megatron_lossy.train", *as_flags(alone), ranks=4)
    assert once.returncode == 0, once.stderr
    run = started(serve(), settings | {"save": tmp_path / "apart", "sync_ranks": sync_ranks}, 2, 3)
    run.all_finish()
    own = [weights(tmp_path / "alone" / f"island_{slot}") for slot in range(2)]
    first, second = (weights(tmp_path / "apart" / f"island_{slot}") for slot in range(2))
    changed = 0.0
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name])
        np.testing.assert_allclose(value, (own[0][name] + own[1][name]) / 2, rtol=1e-4, atol=1e-6)
        changed = max(changed, np.abs(own[0][name] - own[1][name]).max())
    assert changed > 1e-4  # or the mean would be either


@pytest.mark.parametrize(
    ("more", "sync_ranks"),
    [({"bf16": True}, 1), ({"sync_dtype": "int8", "transport": "udp"}, 2)],
    ids=["bf16, 1 rank exchanges", "int8, 2 ranks exchange"],
)
def test_an_island_comes_back_with_fewer_ranks(data, serve, more, sync_ranks):
    """It copies weights and moments: each rank that exchanges has its part of them."""
    settings = (
        data | more | {"train_iters": 10**5, "eval_interval": 10**5, "log_interval": 10, "sync_ranks": sync_ranks}
    )
    run = started(serve(), settings, 2, 3)
    run.until(0, r"iteration +20/")
    run.kill(1)
    run.until(0, r"iteration +40/")
    run.ranks = 2
    run.start(1)
    run.until(1, "goes on at iteration")
    began = int(re.search(r"goes on at iteration +(\d+)", run.printed(1))[1])
    run.until(1, rf"iteration +{began // 10 * 10 + 40}/")
    for slot in (1, 0):
        run.islands[slot][0].send_signal(signal.SIGTERM)
    ends = run.ends()
    assert [statuses for statuses, *_ in ends.values()] == [[3, 3]] * 2, ends
    copies = re.findall(r"has copied island 0 as of iteration (\d+), rank (\d) (\w+)", ends[1][2])
    assert {int(rank) for _, rank, _ in copies} == {0, 1}, ends[1][2]
    for made, rank, digest in copies:
        if int(rank) < sync_ranks:
            assert f"island 1 copies it as of iteration {made}, rank {rank} {digest}" in ends[0][2]


class Counted:
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(("ranks", "micro"), [(1, 1), (2, 1), (3, 1), (3, 2), (2, 3)])
def test_an_island_reads_the_same_samples_with_any_number_of_ranks(monkeypatch, ranks, micro):
    from megatron_lossy.lab.train import data as module
    from megatron_lossy.lab.train.config import TrainConfig

    monkeypatch.setattr(module, "on_device", lambda samples, _: samples)
    config = TrainConfig(
        **TINY | {"micro_batch_size": micro, "global_batch_size": 12, "data_path": ("x",), "eval_iters": 0}
    )
    for part in range(2):
        read = []
        for rank in range(ranks):
            batches = RankBatches(Counted(), config, 12, part * ranks + rank, 2 * ranks, parts=2)
            read += [sample for _ in range(2 * 6 // (micro * ranks)) for sample in next(batches)]
        assert sorted(read) == [start + 6 * part + k for start in (12, 24) for k in range(6)]
