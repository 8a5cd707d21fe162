"""Islands in the training program: what they reduce to, continued runs, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lossy.base.checkpoints import TRACKER, latest_iteration
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.saved import check_folders, in_folders_of_job
from tests.ranks import run_ranks
from tests.trainer import TINY, read_records, recorded_losses, train_runs, weights_of

pytestmark = pytest.mark.shows("islands in one process: reductions, continued, speeds")

SMALL = TINY | {"num_layers": 1, "log_interval": 1, "micro_batch_size": 1, "virtual_workers": 4, "eval_iters": 1}
ISLANDS = {"islands": 4, "sync_method": "parameters"}
LOSS = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 256}


def train_all(data: dict, folder: Path, cases: dict[str, tuple[dict, dict]], train=train_runs) -> dict[str, Path]:
    """Return the folder of each case, trained one after the other in one process."""
    runs = [(SMALL | data | {"save": str(folder / name)} | settings, loss) for name, (settings, loss) in cases.items()]
    run_ranks(train, 1, *runs, timeout=900)
    return {name: folder / name for name in cases}


def whole_and_parts(folder: Path, settings: dict, loss: dict, *stops: int) -> list[tuple[dict, dict]]:
    """Return a run in ``folder / "whole"``, and one in ``folder / "parts"`` that stops at ``stops`` and goes on."""
    parts = settings | {"save": str(folder / "parts"), "load": str(folder / "parts")}
    stopped = [(parts | {"exit_interval": stop}, loss) for stop in stops]
    return [(settings | {"save": str(folder / "whole")}, loss), *stopped, (parts, loss)]


def islands_of(folder: Path) -> dict:
    path = folder / f"iter_{latest_iteration(folder):07d}" / "lossy_islands.pt"
    return torch.load(path, weights_only=True)


def flat(state) -> list:
    """Return everything in a saved state, in order, tensors as bytes."""
    if isinstance(state, dict):
        return [item for key in sorted(state, key=str) for item in (key, *flat(state[key]))]
    if isinstance(state, list | tuple):
        return [item for one in state for item in flat(one)]
    return [state.contiguous().view(-1).view(torch.uint8).numpy().tobytes() if torch.is_tensor(state) else state]


def losses_of(folder: Path) -> list[tuple]:
    """Return training and validation losses alone: other runs name their metrics and weights otherwise."""
    return [(r["iteration"], r["lm loss"]) for kind in ("train", "valid") for r in read_records(folder, kind)]


@pytest.mark.slow
def test_what_islands_reduce_to(data, tmp_path):
    plain_sgd = {"optimizer": "sgd", "sgd_momentum": 0.5, "clip_grad": 0.0, "weight_decay": 0.1, "hidden_dropout": 0.0}
    every = {"sync_interval": 2}
    folders = train_all(
        data,
        tmp_path,
        {
            "no islands": ({}, {"eval_weights": "consensus"}),
            "gradients": ({}, {"islands": 4, "sync_method": "gradients", "eval_weights": "consensus"}),
            "lossy": ({}, {**LOSS}),
            "lossy gradients": ({}, {**LOSS, "islands": 2, "sync_method": "gradients"}),
            "sgd": (plain_sgd, {"eval_weights": "consensus"}),
            "sgd averaged": (plain_sgd, ISLANDS),
            "adam averaged": ({}, ISLANDS),
            "averaged": ({}, {**ISLANDS, **every}),
            "diloco": ({}, {**ISLANDS, **every, "sync_method": "diloco", "outer_optimizer": (1.0, 0.0)}),
            "alone": ({}, {**ISLANDS, "sync_method": "none"}),
        },
    )
    for one, other in (("no islands", "gradients"), ("lossy", "lossy gradients")):
        assert recorded_losses(folders[one]) == recorded_losses(folders[other])
        assert weights_of(folders[one]) == weights_of(folders[other])
    # All weights averaged after each step of plain gradient descent: averaged gradients.
    sgd, averaged = (dict(losses_of(folders[name])) for name in ("sgd", "sgd averaged"))
    assert list(averaged.values()) == pytest.approx(list(sgd.values()), rel=2e-6)
    # With Adam it is not: each island has a second moment of its own.
    adam = losses_of(folders["adam averaged"])
    assert [loss for _, loss in adam] != pytest.approx([loss for _, loss in losses_of(folders["gradients"])], rel=1e-3)
    assert losses_of(folders["averaged"]) == losses_of(folders["diloco"])
    assert weights_of(folders["averaged"]) == weights_of(folders["diloco"])
    assert losses_of(folders["alone"]) != losses_of(folders["averaged"])
    islands = islands_of(folders["adam averaged"])["islands"]
    assert all(torch.equal(one["weights"][0], islands[0]["weights"][0]) for one in islands)
    assert not torch.equal(*(flat_moments(one) for one in islands[:2]))


def flat_moments(island: dict) -> torch.Tensor:
    states = island["optimizers"][0]["state"].values()
    return torch.cat([state["exp_avg_sq"].view(-1) for state in states])


CONTINUED = {
    "in flight": ({}, {**ISLANDS, "sync_fraction": 0.25, "sync_delay": 3}),
    "ema, bf16, lost": (
        {"bf16": True},
        {**ISLANDS, "sync_fraction": 0.5, "sync_delay": 1, "delay_correction": "ema", "p_sync": 0.3},
    ),
    "smith": ({}, {**ISLANDS, "sync_fraction": 0.5, "sync_delay": 3, "delay_correction": "smith"}),
    "lossy inside": (
        {},
        {**LOSS, **ISLANDS, "islands": 2, "sync_fraction": 0.5, "sync_delay": 2, "grad_recovery": "previous"},
    ),
    "speeds": ({"train_iters": 16}, {**ISLANDS, "sync_delay": 1, "island_speeds": (3.0, 2.0, 1.0, 2.0)}),
    "eager": (
        {"optimizer": "nadam"},
        {"islands": 4, "sync_method": "eager-diloco", "sync_interval": 2, "sync_delay": 2},
    ),
}


@pytest.mark.slow
def test_stopped_and_continued_bit_for_bit(data, tmp_path):
    """In the middle of exchanges, with dropout."""
    runs = []
    for name, (settings, loss) in CONTINUED.items():
        loss = {**loss, "save_replicas": True, "eval_weights": "both"}
        runs += whole_and_parts(tmp_path / name, SMALL | data | settings, loss, 5)
    run_ranks(train_runs, 1, *runs)
    for name in CONTINUED:
        whole, parts = tmp_path / name / "whole", tmp_path / name / "parts"
        assert recorded_losses(whole) == recorded_losses(parts), name
        assert weights_of(whole) == weights_of(parts), name
        assert flat(islands_of(whole)) == flat(islands_of(parts)), name
        replica, consensus = (record["lm loss"] for record in read_records(whole, "valid")[-2:])
        assert replica != consensus, name
    rounds = islands_of(tmp_path / "in flight" / "whole")["rounds"]
    assert [flight[1] for flight in rounds[0]["flights"]] == [5, 6, 7]


def test_faster_islands_make_more_iterations(data, tmp_path):
    loss = {**ISLANDS, "island_speeds": (3.0, 2.0, 1.0, 2.0)}
    folder = train_all(data, tmp_path, {"speeds": ({"train_iters": 16}, loss)})["speeds"]
    records = read_records(folder, "train")
    assert len(records) == 8 and records[-1]["consumed samples"] == 16 * 8
    islands = islands_of(folder)["islands"]
    steps = [next(iter(one["optimizers"][0]["state"].values()))["step"] for one in islands]
    assert [int(step) for step in steps] == [24, 16, 8, 16]
    # All learning rates have come down to 0, each in as many iterations of its own.
    assert all(one["optimizers"][0]["param_groups"][0]["lr"] == pytest.approx(0.0, abs=1e-12) for one in islands)


def test_islands_lose_other_things(data, tmp_path):
    loss = {**LOSS, **ISLANDS, "islands": 2, "sync_method": "none"}
    run_ranks(look_at_losses, 1, SMALL | data | {"save": str(tmp_path / "run")}, loss)


def look_at_losses(rank: int, config: dict, loss: dict) -> None:
    from megatron_lossy.lab.virtual.islands import VirtualIslands

    seen = []
    exchange = VirtualIslands.exchange

    def look(self, successful):
        seen.append([cluster.streams[0].delivery("grad", self.iteration) for cluster in self.clusters])
        exchange(self, successful)

    VirtualIslands.exchange = look
    train_runs(rank, (config, loss))
    assert [list(delivery.sources) for delivery in seen[0]] == [[0, 1], [2, 3]]
    lost = np.array([[~delivery.arrived for delivery in iteration] for iteration in seen])
    assert 0.05 < lost.mean() < 0.25 and (lost[:, 0] & lost[:, 1]).mean() < 0.7 * lost.mean()


def test_where_an_island_finds_its_checkpoint(tmp_path):
    """In the folder of the run until it has one of its own: one that was started from a checkpoint can be continued."""
    config = TrainConfig(**SMALL | {"data_path": ("data",), "eval_iters": 0, "load": str(tmp_path), "save": "out"})
    own, jobs = tmp_path / "island_1", LossyConfig(islands=2, sync_method="none").jobs()
    assert in_folders_of_job(config, jobs, 1).load == str(own)
    (tmp_path / TRACKER).write_text("4")
    assert in_folders_of_job(config, jobs, 1).load == str(tmp_path)
    own.mkdir()
    (own / TRACKER).write_text("8")
    continued = in_folders_of_job(config, jobs, 1)
    assert (continued.load, continued.save) == (str(own), os.path.join("out", "island_1"))
    assert in_folders_of_job(config, jobs, 0).load == str(tmp_path)


def test_a_mean_is_no_checkpoint_to_continue_from(tmp_path):
    folder = tmp_path / "consensus"
    (folder / "iter_0000008").mkdir(parents=True)
    (folder / TRACKER).write_text("8")
    config = TrainConfig(**SMALL | {"data_path": ("data",), "eval_iters": 0, "load": str(folder)})
    with pytest.raises(UsageError, match="has mean weights alone .--save-consensus., for --finetune of Megatron-LM"):
        check_folders(config, LossyConfig())


def test_checkpoints_of_others_are_refused(data, tmp_path):
    base, plain, four = SMALL | data, str(tmp_path / "plain"), str(tmp_path / "four")
    run_ranks(train_runs, 1, (base | {"save": plain}, {}), (base | {"save": four}, ISLANDS))
    more = {"train_iters": 12}
    for settings, loss, line in (
        ({"load": plain, **more}, ISLANDS, "--islands 4: the checkpoint .* is of no islands"),
        ({"load": four, **more}, {**ISLANDS, "islands": 2}, "--islands with .*: islands was 4 there and is 2 here"),
        ({"load": four, **more}, {**ISLANDS, "sync_method": "none"}, "--sync-method none: exchanges were others in .*"),
        (more, {**ISLANDS, "sync_fraction": 1e-5}, r"--sync-fraction 1e-05: of \d+ elements is less than one .*"),
    ):
        run_ranks(refused, 1, (base | settings, loss), line)


def refused(rank: int, run: tuple[dict, dict], line: str) -> None:
    with pytest.raises(UsageError, match=f"^{line}$"):
        train_runs(rank, run)
