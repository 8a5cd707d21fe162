"""Real gloo ranks of an asynchronous pipeline in the training program: what they compute, save, and refuse."""

from __future__ import annotations

import math
import os
import re
import signal
import warnings

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.async_pipeline.workers import StageWorkers
from megatron_lossy.lab.train import loop
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.metrics import Console
from megatron_lossy.lab.train.saved import check_folders
from megatron_lossy.lab.train.workers import Workers
from tests.programs import start_ranks, until
from tests.ranks import run_ranks
from tests.rules import assert_same
from tests.test_islands_train import whole_and_parts
from tests.trainer import TINY, as_flags, checkpoint_bytes, read_records, recorded_losses, saved_replicas, train_runs

pytestmark = pytest.mark.shows(
    "real stages are virtual ones, one stage is synchronous, bit for bit",
    "continued bit for bit while the pipe fills and drains",
    "a killed stage, a diverged loss or a signal ends all stages",
)

ASYNC = {"async_pipeline": True}
LOSS = dict(p_grad=0.3, p_param=0.3, loss_unit="packet", packet_bytes=64, eval_weights="both")


#: Clipping is felt, and every update is large compared with rounding.
COMPARED = TINY | dict(lr_decay_style="constant", lr_warmup_iters=0, adam_eps=1e-3, clip_grad=0.5)
COMPARED |= dict(weight_decay=0.0, hidden_dropout=0.0, eval_iters=0, train_iters=6, log_interval=1)


def in_whole(name, before):
    """Return the whole model's name of the parameter ``name`` of a stage, with ``before`` layers before the stage."""
    return re.sub(r"(?<=layers\.)\d+", lambda number: str(int(number[0]) + before), name)


def weights_of(chunk):
    named = ((name.removeprefix("module."), p) for name, p in chunk.module.named_parameters())
    return {name: p.detach().float().numpy().copy() for name, p in named}


def observed_run(rank, config, loss, first=None):
    """Train; the weights of this rank's stage before the first iteration and after each, by name.

    ``logged``: on rank 0, (loss, norm of the gradient) of each log line. ``first``: the weights of the whole model to start
    from; default random ones. With virtual stages the stage is the whole model.
    """
    warnings.simplefilter("ignore")
    seen = {"weights": [], "logged": []}

    class Observed(Console):
        def note(self, text):
            pass

        def train(self, record, *_):
            seen["logged"].append((record["lm loss"], record["grad norm"]))

        def valid(self, record):
            pass

    workers = Workers if config.get("virtual_workers") else StageWorkers

    def iterate(self, *arguments, original=workers.iterate):
        [chunk] = self._chunks
        if not seen["weights"]:
            seen["weights"].append(weights_of(chunk))
        result = original(self, *arguments)
        seen["weights"].append(weights_of(chunk))
        return result

    def build_model(config, vocab_size, original=loop.build_model):
        [chunk] = original(config, vocab_size)
        stage = parallel_state.get_pipeline_model_parallel_rank()
        before = stage * config.num_layers // config.pipeline_model_parallel_size
        for name, parameter in chunk.module.named_parameters() if first else ():
            parameter.data.copy_(torch.from_numpy(first[in_whole(name.removeprefix("module."), before)]))
        return [chunk]

    workers.iterate, loop.build_model = iterate, build_model
    loop.train(TrainConfig(**config), LossyConfig(**loss), Observed())
    return seen


@pytest.mark.parametrize(
    ("stages", "ranks", "settings"),
    [
        (2, 1, {"bf16": True, "optimizer": "nadam"}),
        (2, 2, {"weight_decay": 0.1, "clip_grad": 0.0, "overlap_grad_reduce": True, "ddp_bucket_size": 9000}),
        (3, 1, {"num_layers": 3}),
    ],
    ids=["two stages, bf16", "two stages of two ranks", "three stages"],
)
def test_ranks_are_the_virtual_stages(data, stages, ranks, settings):
    """Bit for bit; several ranks without clipping, since they add up their norm in another order."""
    config = COMPARED | data | settings
    virtual = config | {"virtual_workers": ranks}
    [expected] = run_ranks(observed_run, 1, virtual, ASYNC | {"virtual_stages": stages})
    real = config | {"pipeline_model_parallel_size": stages}
    seen = run_ranks(observed_run, stages * ranks, real, ASYNC, expected["weights"][0])[::ranks]
    each = config["num_layers"] // stages
    whole = [
        {in_whole(name, s * each): w for s in range(stages) for name, w in seen[s]["weights"][n].items()}
        for n in range(config["train_iters"] + 1)
    ]
    assert_same(whole, expected["weights"])
    assert max(np.abs(whole[-1][name] - before).max() for name, before in whole[0].items()) > 1e-2
    np.testing.assert_allclose(seen[0]["logged"], expected["logged"], rtol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap_grad_reduce": True, "ddp_bucket_size": 9000},
        {"bf16": True, "calculate_per_token_loss": True, "attention_dropout": 0.1},
    ],
    ids=["overlap", "bf16, per token"],
)
@pytest.mark.slow
def test_one_stage_is_the_synchronous_run_bit_for_bit(data, tmp_path, settings):
    base = TINY | data | settings
    folders = [tmp_path / "synchronous", tmp_path / "asynchronous"]
    runs = [(base | {"save": str(folder)}, flags) for folder, flags in zip(folders, ({}, ASYNC))]
    run_ranks(train_runs, 2, *runs)
    named = [[dict(row) for row in recorded_losses(folder)] for folder in folders]
    assert all(row.items() <= more.items() for row, more in zip(*named, strict=True))
    assert checkpoint_bytes(folders[0], 8) == checkpoint_bytes(folders[1], 8)


CONTINUED = {
    "two stages, bf16": (2, {"bf16": True, "pipeline_model_parallel_size": 2}, {}),
    "three stages": (3, {"num_layers": 3, "pipeline_model_parallel_size": 3, "optimizer": "nadam"}, {}),
    "2 x 2, loss": (4, {"pipeline_model_parallel_size": 2, "overlap_grad_reduce": True}, LOSS),
    "2 x tensor 2": (
        4,
        {"pipeline_model_parallel_size": 2, "tensor_model_parallel_size": 2, "make_vocab_size_divisible_by": 64},
        {},
    ),
}


@pytest.mark.parametrize(("ranks", "settings", "loss"), CONTINUED.values(), ids=CONTINUED)
@pytest.mark.slow
def test_resumed_run_equals_uninterrupted_one(data, tmp_path, ranks, settings, loss):
    """Stopped while the pipe fills, in between, and while it drains."""
    flags = ASYNC | loss | {"save_replicas": True}
    runs = whole_and_parts(tmp_path, TINY | data | settings, flags, 1, 5, 7)
    whole, *parts = run_ranks(train_runs, ranks, *runs)[0][0]
    assert [part["iteration"] for part in parts] == [1, 5, 7, 8] and whole["finished"] and parts[-1]["finished"]
    once, twice = tmp_path / "whole", tmp_path / "parts"
    assert recorded_losses(once) == recorded_losses(twice)
    assert checkpoint_bytes(once, 8) == checkpoint_bytes(twice, 8)
    assert saved_replicas(once, 8) == saved_replicas(twice, 8)
    assert not loss or whole["valid"]["replica"] != whole["valid"]["owner"]


def test_a_run_with_other_samples_cannot_continue_what_is_under_way(data, tmp_path):
    """Activations of one sample would meet the labels of another."""
    base = TINY | data | {"pipeline_model_parallel_size": 2, "eval_iters": 0}
    flags = ASYNC | {"save_replicas": True}
    once = base | {"save": str(tmp_path / "once"), "load": str(tmp_path / "once")}
    run_ranks(train_runs, 2, (once | {"exit_interval": 5}, flags))
    go_on = base | {"load": str(tmp_path / "once"), "save": str(tmp_path / "twice")}
    lossy = LossyConfig(**flags)
    check_folders(TrainConfig(**go_on), lossy)
    changes = {"train_iters": 9, "seed": 2, "global_batch_size": 4, "micro_batch_size": 1, "seq_length": 16}
    for name, value in changes.items():
        config = TrainConfig(**go_on | {name: value})
        assert value != base.get(name)
        line = f"^--save-replicas with --load .*: --{name.replace('_', '-')} was .* there and is {value} here: other samples"
        with pytest.raises(UsageError, match=line):
            check_folders(config, lossy)
        check_folders(config, LossyConfig(**ASYNC))
    with pytest.raises(UsageError, match="the data had other contents: other samples were under way"):
        check_folders(TrainConfig(**go_on), lossy, ["other"])
    run_ranks(train_runs, 2, (once, flags))
    check_folders(TrainConfig(**go_on | {"train_iters": 9}), lossy)  # nothing is under way at the end


def test_without_saved_replicas_all_versions_start_as_the_newest(data, tmp_path):
    base = TINY | data | {"pipeline_model_parallel_size": 2, "log_interval": 1, "eval_iters": 0}
    run_ranks(train_runs, 2, *whole_and_parts(tmp_path, base, ASYNC, 4))
    whole, resumed = ([row["lm loss"] for row in read_records(tmp_path / name, "train")] for name in ("whole", "parts"))
    assert whole[:4] == resumed[:4]
    # The next batch went forward through the first stage before the last update there, or after it.
    assert whole[4] != resumed[4] and max(abs(a - b) for a, b in zip(whole, resumed)) < 0.3


def test_evaluating_and_saving_change_nothing(data, tmp_path):
    base = TINY | data | {"num_layers": 3, "pipeline_model_parallel_size": 3, "log_interval": 4, "train_iters": 9}
    base |= {"global_batch_size": 2}  # one micro-batch: what came of an iteration is known two later
    quiet, busy = tmp_path / "quiet", tmp_path / "busy"
    often = {"eval_interval": 2, "save_interval": 3, "save": str(tmp_path / "saved"), "log_interval": 1}
    runs = [base | {"metrics_dir": str(quiet), "eval_iters": 0}, base | often | {"metrics_dir": str(busy)}]
    run_ranks(train_runs, 3, *((run, ASYNC) for run in runs))
    rows = read_records(busy, "train")
    means = [
        sum(row["lm loss"] for row in rows[first : first + 4]) / len(rows[first : first + 4]) for first in (0, 4, 8)
    ]
    assert [row["lm loss"] for row in read_records(quiet, "train")] == pytest.approx(means, rel=1e-12)
    assert [row["grad norm"] for row in read_records(quiet, "train")] == [rows[n]["grad norm"] for n in (3, 7, 8)]
    assert all(math.isfinite(row["lm loss"]) for row in read_records(busy, "valid"))


def signalled_run(rank, *run):
    """As :func:`train_runs` of one run, whose second stage gets a signal to stop in its fifth iteration."""

    def iterate(self, *arguments, original=StageWorkers.iterate):
        if rank == 1 and self._iteration == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *arguments)

    StageWorkers.iterate = iterate
    return train_runs(rank, run)


def test_a_signal_stops_all_stages_together(data, tmp_path):
    base = TINY | data | {"num_layers": 3, "pipeline_model_parallel_size": 3, "train_iters": 10, "log_interval": 50}
    base |= {"global_batch_size": 2, "eval_iters": 0}  # one micro-batch: a signal is known two iterations later
    flags = ASYNC | {"save_replicas": True}
    once, twice = tmp_path / "once", tmp_path / "twice"
    again = base | {"save": str(twice), "load": str(twice)}
    results = run_ranks(signalled_run, 3, again, flags)
    assert [summaries[0]["iteration"] for summaries, _ in results] == [7, 7, 7]
    assert "exiting on SIGTERM at iteration 7" in results[0][1]
    results = run_ranks(train_runs, 3, (base | {"save": str(once)}, flags), (again, flags))
    assert all(summary["finished"] for summary in results[0][0])
    assert recorded_losses(once) == recorded_losses(twice)
    assert checkpoint_bytes(once, 10) == checkpoint_bytes(twice, 10)


def test_the_iteration_that_diverged_is_named_although_it_is_known_later(data):
    base = TINY | data | {"pipeline_model_parallel_size": 2, "lr": 1e30, "lr_warmup_iters": 0, "eval_iters": 0}
    runs = [base | {"log_interval": interval} for interval in (1, 100)]
    summaries = run_ranks(train_runs, 2, *((run, ASYNC) for run in runs))[0][0]
    at_once, later = (summary["diverged"] for summary in summaries)
    assert at_once == later and re.fullmatch("the loss of iteration [2-7] is (nan|inf)", later)
    assert summaries[0]["iteration"] + 1 == summaries[1]["iteration"]


def test_a_killed_rank_ends_the_others(data, tmp_path):
    base = TINY | data | {"num_layers": 3, "pipeline_model_parallel_size": 3, "train_iters": 100_000, "log_interval": 1}
    flags = as_flags(base | ASYNC | {"eval_iters": 0, "save": str(tmp_path / "run")})
    ranks = start_ranks("megatron_lossy.train", *flags, ranks=3)
    until(lambda: "iteration        5/" in ranks[0].printed(), *ranks)
    ranks[0].send_signal(signal.SIGKILL)
    for rank in ranks[1:]:  # the last one has no message of the one that died
        _, said = rank.communicate(timeout=60)
        assert rank.returncode == 1 and "lost contact with another rank" in said
