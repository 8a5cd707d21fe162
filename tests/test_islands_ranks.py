"""Islands of real gloo ranks: each a world of its own, with the weights of virtual islands to the last bit."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.base.errors import UsageError
from megatron_lossy.delivery_log.reader import DeliveryLogFolder
from megatron_lossy.lab.delivery_log.verify import verify
from megatron_lossy.mechanisms.islands.ranks import RankIslands
from tests.ranks import RankFailed, run_ranks
from tests.test_islands_train import whole_and_parts
from tests.trainer import TINY, checkpoint_bytes, in_iteration, read_records, train_runs

pytestmark = pytest.mark.shows(
    "islands of 1 and 2 ranks are virtual ones, bit for bit",
    "averaged weights of descent are averaged gradients, TP 2, PP 2",
    "continued bit for bit, losses replayed, an island that dies",
)

SMALL = TINY | {"log_interval": 1, "micro_batch_size": 1, "eval_iters": 1, "hidden_dropout": 0.0}
TWO = {"islands": 2, "sync_method": "parameters"}
LATE = {**TWO, "sync_fraction": 0.25, "sync_delay": 3}


def train_both(data: dict, folder: Path, workers: int, cases: dict[str, tuple[dict, dict]], train=train_runs) -> None:
    """Train each case on ``workers`` virtual workers and on as many ranks, in folders virtual and real of ``folder``.

    The loopback device loses nothing, so that what is drawn is all that is lost over UDP, too.
    """
    runs = {name: (SMALL | data | settings, loss) for name, (settings, loss) in cases.items()}
    virtual = [
        (
            settings | {"virtual_workers": workers, "save": str(folder / "virtual" / name)},
            _in_memory(loss),
        )
        for name, (settings, loss) in runs.items()
    ]
    real = [(settings | {"save": str(folder / "real" / name)}, loss) for name, (settings, loss) in runs.items()]
    run_ranks(train, 1, *virtual)
    run_ranks(train, workers, *real, grouped=False)


def _in_memory(loss: dict) -> dict:
    """Return the same loss between workers of one process."""
    kept = {name: value for name, value in loss.items() if name != "udp_deadline"}
    return kept | ({"transport": "pieces"} if "transport" in loss else {})


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the tensors of the model by name, layer by layer."""
    found = {}
    for name, value in checkpoint_bytes(folder, latest_iteration(folder)).items():
        if not name.startswith(("optimizer", "rng")):
            layers = TINY["num_layers"] if "layers" in name else 1
            size = len(value) // layers
            found |= {f"{name} {k}": value[k * size : (k + 1) * size] for k in range(layers)}
    assert len(found) > 10
    return found


def check_same(folder: Path, name: str) -> None:
    """All weights of all islands to the last bit, and losses, which ranks add up in another order."""
    virtual, real = folder / "virtual" / name, folder / "real" / name
    assert weights_of(virtual) == weights_of(real / "island_0")
    path = virtual / f"iter_{latest_iteration(virtual):07d}" / "lossy_islands.pt"
    state = torch.load(path, map_location="cpu", weights_only=True)
    for island, saved in enumerate(state["islands"]):
        everything = b"".join(map(bytes_of, saved["weights"]))
        there = weights_of(real / f"island_{island}")
        assert all(value in everything for value in there.values()), (virtual, island)
    for kind in ("train", "valid"):
        records = [read_records(real / f"island_{number}", kind) for number in range(2)]
        mean = [sum(r["lm loss"] for r in one) / 2 for one in zip(*records, strict=True)]
        assert [r["lm loss"] for r in read_records(virtual, kind)] == pytest.approx(mean, rel=1e-6), (virtual, kind)
    assert latest_iteration(virtual) == latest_iteration(real / "island_0") == SMALL["train_iters"]


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


LOST = {"p_sync": 0.3, "loss_unit": "packet", "packet_bytes": 256}
INSIDE = {"p_grad": 0.3, "p_param": 0.3}
OUTER = {"islands": 2, "sync_interval": 2, "sync_method": "diloco", "save_replicas": True}
HALVES = {**OUTER, "sync_dtype": "int4", "sync_fraction": 0.5, "sync_delay": 3}


@pytest.mark.on_cuda
@pytest.mark.shows("islands of 1 and 2 ranks are virtual ones, bit for bit")
@pytest.mark.slow
def test_two_islands_of_a_rank_are_virtual_ones(data, tmp_path):
    cases = {
        "at once": ({}, TWO),
        "late, dropout": ({"hidden_dropout": 0.1}, LATE),
        "ema, bf16": ({"bf16": True}, {**LATE, "delay_correction": "ema"}),
        "smith": ({}, {**LATE, **LOST, "sync_fraction": 0.5, "delay_correction": "smith"}),
        "lost": ({}, {**LATE, **LOST, "delay_correction": "none", "sync_dtype": "bf16"}),
        "rounded": ({}, {**LATE, **LOST, "sync_dtype": "bf16"}),
        "in 8 bits": ({}, {**LATE, **LOST, "sync_dtype": "int8", "sync_block": 16}),
        "in 8 bits, datagrams": ({}, {**LATE, **LOST, "p_sync": 0.2, "transport": "udp", "sync_dtype": "int8"}),
        "whole shards lost": (
            {},
            {**LATE, "p_sync": 0.5, "sync_interval": 2, "sync_subset": "bernoulli", "sync_block": 5},
        ),
        "diloco": ({}, {**OUTER, "p_sync": 0.3}),
        "diloco in 8 bits": ({}, {**OUTER, "p_sync": 0.3, "sync_dtype": "int8"}),
        "diloco in 4 bits, datagrams": ({}, {**HALVES, **LOST, "p_sync": 0.2, "transport": "udp", "sync_delay": 1}),
        "diloco in 4 bits": ({"bf16": True}, {**HALVES, "sync_subset": "partition", "sync_delay": 1}),
        "eager": ({"optimizer": "nadam"}, {**OUTER, "sync_method": "eager-diloco", "sync_delay": 2}),
        "datagrams": ({}, {**LATE, **LOST, "p_sync": 0.2, "transport": "udp"}),
        "streams": ({}, {**LATE, **LOST, "p_sync": 0.25, "transport": "stream", "udp_deadline": "30000"}),
        "alone": ({}, {**TWO, "sync_method": "none"}),
    }
    train_both(data, tmp_path, 2, cases)
    for name in cases:
        check_same(tmp_path, name)
    different = {name: weights_of(tmp_path / "real" / name / "island_0")["output_layer.weight 0"] for name in cases}
    assert len(set(different.values())) == len(cases)


@pytest.mark.on_cuda
@pytest.mark.shows("islands of 1 and 2 ranks are virtual ones, bit for bit")
@pytest.mark.nightly
def test_two_islands_of_two_ranks_are_virtual_ones(data, tmp_path):
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    cases = {
        "late": ({}, {**LATE, "eval_weights": "both", "save_consensus": True}),
        "all lost, overlapped": (overlapped, {**LATE, **LOST, **INSIDE, "grad_recovery": "previous"}),
        "all lost, bf16": ({"bf16": True}, {**LATE, **LOST, **INSIDE, "sync_block": 16}),
        "in pieces": ({}, {**LATE, **INSIDE, "transport": "pieces"}),
        "datagrams": ({"bf16": True}, {**LATE, **LOST, **INSIDE, "transport": "udp"}),
    }
    train_both(data, tmp_path, 4, cases)
    for name in cases:
        check_same(tmp_path, name)
    mean = weights_of(tmp_path / "virtual" / "late" / "consensus")
    assert mean == weights_of(tmp_path / "real" / "late" / "consensus")
    assert mean != weights_of(tmp_path / "virtual" / "late")


def train_with_overflows(rank: int, *runs: tuple[dict, dict]) -> None:
    """Every optimizer skips its third and fourth update."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    prepare = MixedPrecisionOptimizer.prepare_grads

    def overflowing(self):
        self.asked = getattr(self, "asked", 0) + 1
        return prepare(self) or self.asked in (3, 4)

    MixedPrecisionOptimizer.prepare_grads = overflowing
    train_runs(rank, *runs)


@pytest.mark.slow
def test_exchanges_of_skipped_iterations(data, tmp_path):
    """They begin and are used where nothing is updated, too, and all ranks of an island have them."""
    cases = {
        "fp32": ({}, {**LATE, "sync_delay": 1}),
        "bf16, overlapped": (
            {"bf16": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
            {**LATE, "sync_delay": 2, "delay_correction": "ema"},
        ),
    }
    train_both(data, tmp_path, 4, cases, train_with_overflows)
    for name in cases:
        check_same(tmp_path, name)
        records = read_records(tmp_path / "real" / name / "island_0", "train")
        assert [record["iteration"] for record in records if record["skipped"]] == [3, 4]


CONTINUED = {
    "late": ({}, {**LATE, **LOST, **INSIDE, "grad_recovery": "previous"}),
    "ema": ({"bf16": True}, {**LATE, "delay_correction": "ema", "sync_interval": 2, "sync_dtype": "bf16"}),
    "smith": ({}, {**LATE, **LOST, "sync_fraction": 1.0, "delay_correction": "smith"}),
    "int8": ({}, {**LATE, **LOST, "sync_fraction": 1.0, "delay_correction": "smith", "sync_dtype": "int8"}),
    "diloco": ({"bf16": True}, {**HALVES, "p_sync": 0.3}),
    "eager": ({"optimizer": "nadam"}, {**OUTER, "sync_method": "eager-diloco", "sync_delay": 2}),
}


@pytest.mark.slow
def test_stopped_and_continued_bit_for_bit(data, tmp_path):
    """With exchanges under way, which --save-replicas keeps."""
    runs = []
    for name, (settings, loss) in CONTINUED.items():
        base = SMALL | data | settings | {"hidden_dropout": 0.1}
        runs += whole_and_parts(tmp_path / name, base, {**loss, "save_replicas": True}, 5)
    run_ranks(train_runs, 4, *runs, grouped=False)
    for name in CONTINUED:
        for island in ("island_0", "island_1"):
            whole, parts = tmp_path / name / "whole" / island, tmp_path / name / "parts" / island
            assert checkpoint_bytes(whole, 8).keys() == checkpoint_bytes(parts, 8).keys()
            assert weights_of(whole) == weights_of(parts), name
            for kind in ("train", "valid"):
                one, other = ([timeless(r) for r in read_records(folder, kind)] for folder in (whole, parts))
                assert one == other, (name, kind)


def timeless(record: dict) -> dict:
    return {name: value for name, value in record.items() if name not in ("seconds", "sync wait")}


def die(rank: int, run: tuple[dict, dict]) -> None:
    """The last rank is gone in its fourth iteration, without a word."""
    in_iteration(4, lambda made: os._exit(1) if rank == 3 else None)
    train_runs(rank, run)


def test_others_notice_that_an_island_is_gone(data, tmp_path):
    """Also those who have nothing to do with the rank that died but through exchanges that are under way."""
    with pytest.raises(RankFailed) as failed:
        run = (SMALL | data | {"train_iters": 100, "eval_iters": 0}, {**LATE, "sync_delay": 5})
        run_ranks(die, 4, run, grouped=False)
    text = str(failed.value)
    assert "rank 3:\nthe process died" in text and "no result after" not in text
    assert len(re.findall(r"^rank [012]:$", text, re.MULTILINE)) >= 2 and "gloo" in text


@pytest.mark.slow
def test_averaged_weights_of_gradient_descent_are_averaged_gradients(data, tmp_path):
    """Also where stages and tensor-parallel ranks each meet their own peers."""
    descent = {"optimizer": "sgd", "sgd_momentum": 0.5, "clip_grad": 0.0, "weight_decay": 0.1, "eval_iters": 2}
    stages = {"pipeline_model_parallel_size": 2}
    sizes = {
        "tensor": ({"tensor_model_parallel_size": 2}, {}),
        "pipeline": (stages, {}),
        "asynchronous": (stages, {"async_pipeline": True}),
    }
    runs = {name: (SMALL | data | descent | size, flags) for name, (size, flags) in sizes.items()}
    one = [(run | {"save": str(tmp_path / name / "one")}, flags) for name, (run, flags) in runs.items()]
    run_ranks(train_runs, 4, *one)
    islands = [(run | {"save": str(tmp_path / name / "islands")}, TWO | flags) for name, (run, flags) in runs.items()]
    run_ranks(train_runs, 4, *islands, grouped=False)
    for name in sizes:
        for kind in ("train", "valid"):
            whole = [record["lm loss"] for record in read_records(tmp_path / name / "one", kind)]
            parts = [read_records(tmp_path / name / "islands" / f"island_{k}", kind) for k in range(2)]
            mean = [sum(record["lm loss"] for record in one) / 2 for one in zip(*parts, strict=True)]
            assert mean == pytest.approx(whole, rel=3e-6), (name, kind)
        first, second = (weights_of(tmp_path / name / "islands" / f"island_{k}") for k in range(2))
        assert first == second and len(first) > 10


@pytest.mark.slow
def test_losses_are_recorded_and_replayed(data, tmp_path):
    loss = {**LATE, **LOST, **INSIDE, "sync_interval": 2}
    again = {**LATE, "sync_interval": 2, "loss_model": ("trace",), "loss_unit": "packet", "packet_bytes": 256}
    log, settings = str(tmp_path / "log"), SMALL | data
    first = (settings | {"save": str(tmp_path / "first")}, {**loss, "delivery_log": log})
    second = (settings | {"save": str(tmp_path / "second")}, {**again, "trace": log})
    for one in (first, second):  # a rank may be through before another has closed its log
        run_ranks(train_runs, 4, one, grouped=False)
    valid = [read_records(tmp_path / "first" / island, "valid") for island in ("island_0", "island_1")]
    assert valid[0] == valid[1] and valid[0], "a validation loss is that of all islands' batches"
    for island in ("island_0", "island_1"):
        assert weights_of(tmp_path / "first" / island) == weights_of(tmp_path / "second" / island)
        records = read_records(tmp_path / "first" / island, "train")
        assert any(record.get("loss rate sync-reduce") for record in records)
        assert any(record.get("loss rate sync-gather") for record in records)
    verdict = verify(DeliveryLogFolder(Path(log)))
    assert verdict.problems == [] and verdict.rows


def load_apart(rank: int, first: tuple[dict, dict], then: tuple[dict, dict]) -> None:
    train_runs(rank, first)
    if rank == 1:
        tracker = Path(first[0]["save"], "island_1", "latest_checkpointed_iteration.txt")
        assert tracker.read_text() == "8"
        tracker.write_text("4")
    with pytest.raises(
        UsageError, match="^--load iteration .: island 0 has 8, island 1 has 4; write one that all have"
    ):
        train_runs(rank, then)


def test_islands_of_different_checkpoints_are_refused(data, tmp_path):
    base, folder = SMALL | data | {"eval_iters": 0}, str(tmp_path / "run")
    first = (base | {"save": folder, "save_interval": 4}, LATE)
    then = (base | {"load": folder, "train_iters": 12}, LATE)
    run_ranks(load_apart, 2, first, then, grouped=False)


def lose_the_last_checkpoint(rank: int, first: tuple[dict, dict], then: tuple[dict, dict]) -> str:
    """Kill an island before its save, after those of the others; return the result."""
    train_runs(rank, first)
    lost = Path(first[0]["save"]).with_name("lost")
    if rank == 2:
        folder = Path(first[0]["save"], "island_1")
        (folder / "latest_checkpointed_iteration.txt").write_text("4")
        shutil.rmtree(folder / "iter_0000008")
        lost.touch()
    while not lost.exists():
        time.sleep(0.01)
    return train_runs(rank, then)[1]


@pytest.mark.slow
def test_an_island_that_was_killed_while_it_saved_takes_the_others_back(data, tmp_path):
    base, folder = SMALL | data | {"train_iters": 12, "save_interval": 4}, str(tmp_path / "run")
    loss = {**LATE, "save_replicas": True}
    run_ranks(train_runs, 4, (base | {"save": str(tmp_path / "whole")}, loss), grouped=False)
    settings = base | {"save": folder, "load": folder}
    said = run_ranks(
        lose_the_last_checkpoint, 4, (settings | {"exit_interval": 8}, loss), (settings, loss), grouped=False
    )
    assert "islands had saved iterations 8, 4: all go on from 4\n" in said[0]
    for island in ("island_0", "island_1"):
        assert weights_of(tmp_path / "whole" / island) == weights_of(Path(folder, island))
        records = [
            [timeless(r) for r in read_records(run / island, "train")] for run in (tmp_path / "whole", Path(folder))
        ]
        assert records[0] == records[1] and len(records[0]) == 12


def test_all_islands_start_from_a_checkpoint_of_none(data, tmp_path):
    base, folder = SMALL | data | {"eval_iters": 0}, str(tmp_path / "one")
    run_ranks(train_runs, 2, (base | {"save": folder}, {}))
    then = base | {"load": folder, "save": str(tmp_path / "islands"), "train_iters": 10}
    run_ranks(train_runs, 2, (then, TWO), grouped=False)
    for island in ("island_0", "island_1"):
        assert [record["iteration"] for record in read_records(tmp_path / "islands" / island, "train")] == [9, 10]


def test_an_island_without_a_checkpoint_makes_no_other_begin_again(tmp_path):
    """Iteration 0 is none: it stands for no checkpoint, whatever folders are there."""
    (tmp_path / "iter_0000000").mkdir()
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("20")
    answers = iter([[20, 0], [1, 1]])
    islands = SimpleNamespace(world=SimpleNamespace(island=0), _of_all=lambda value: next(answers))
    assert RankIslands.rewind(islands, str(tmp_path)) is None
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "20"
