"""Real islands that come and go by a schedule: gloo ranks, with the weights of virtual islands to the last bit."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
import torch

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.mechanisms.islands.epoch_log import EPOCHS
from tests.ranks import RankFailed, run_ranks
from tests.test_islands_churn import write
from tests.test_islands_ranks import INSIDE, LOST, SMALL, check_weights, train_both, weights_of
from tests.trainer import read_records, train_runs, write_data

pytestmark = pytest.mark.shows(
    "real islands of a schedule are virtual ones, bit for bit",
    "islands of a schedule: ended together, continued, logged and replayed",
)

#: All slots and all events: two that return at once, one that was cut off, one that never comes back.
EVENTS = [
    (1, 2, "join"),
    (2, 1, "stop"),
    (3, 2, "freeze"),
    (5, 1, "return"),
    (5, 2, "return"),
    (6, 0, "cut"),
    (7, 0, "return"),
    (7, 1, "stop"),
]
SIX = {"global_batch_size": 6}
THREE = {"islands": 3, "sync_method": "parameters", "sync_fraction": 0.5, "island_keep": 1, "save_replicas": True}
LISTEN = {"island_rejoin": "listen"}
OUTER = {"islands": 3, "sync_method": "diloco", "sync_interval": 2, "save_replicas": True}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    run_ranks(write_data, 1, str(folder))
    return {"data_path": (str(folder / "train"),), "valid_data_path": (str(folder / "valid"),)}


def check_same(virtual: Path, real: Path) -> None:
    """All weights to the last bit, and losses of those that train, which ranks add up in another order."""
    check_weights(virtual, real)
    found = [read_records(folder, "train") for folder in sorted(real.glob("island_*"))]
    for record in read_records(virtual, "train"):
        own = [one["lm loss"] for records in found for one in records if one["iteration"] == record["iteration"]]
        assert record["lm loss"] == pytest.approx(sum(own) / len(own), rel=1e-6), (virtual, record["iteration"])
    for island in sorted(real.glob("island_*")):
        own, all_of_them = ([(r["weights"], r["lm loss"]) for r in read_records(f, "valid")] for f in (island, virtual))
        assert [whose for whose, _ in own] == [whose for whose, _ in all_of_them]
        assert [loss for _, loss in own] == pytest.approx([loss for _, loss in all_of_them], rel=1e-6), island


def check_all(data, folder, ranks, cases, events=EVENTS) -> None:
    """Train ``cases`` by the schedule of ``events`` on virtual and on real islands, and compare; no two come to the same."""
    schedule = {"island_schedule": write(folder / "events", *events)}
    cases = {name: (SIX | settings, loss | schedule) for name, (settings, loss) in cases.items()}
    train_both(data, folder, ranks, cases)
    for name in cases:
        check_same(folder / "virtual" / name, folder / "real" / name)
    ends = {name: weights_of(folder / "real" / name / "island_0")["output_layer.weight 0"] for name in cases}
    assert len(set(ends.values())) == len(cases)


@pytest.mark.slow
def test_islands_of_a_rank_are_virtual_ones(data, tmp_path):
    cases = {
        "copy, at once": ({}, THREE),
        "copy, late, lost": ({"hidden_dropout": 0.1}, THREE | LOST | {"sync_delay": 1, "eval_weights": "both"}),
        "listen, overlapping": ({}, THREE | LOST | LISTEN | {"sync_delay": 3, "delay_correction": "smith"}),
        "diloco": ({}, OUTER),
    }
    check_all(data, tmp_path, 3, cases)


def test_who_listens_sends_once_means_have_set_its_weights(data, tmp_path):
    """Which it alone counts, and all must know."""
    cases = {"halves, late": ({}, THREE | LISTEN | {"sync_delay": 1})}
    check_all(data, tmp_path, 3, cases, [(1, 1, "stop"), (3, 1, "return")])


@pytest.mark.nightly
def test_more_islands_of_a_rank_are_virtual_ones(data, tmp_path):
    bernoulli = {"sync_subset": "bernoulli", "sync_block": 5, "sync_interval": 2, "sync_delay": 1}
    cases = {
        "ema, bf16": ({"bf16": True}, THREE | {"sync_delay": 2, "delay_correction": "ema"}),
        "listen, in halves": ({}, THREE | LISTEN | {"island_keep": 0}),
        "listen, rounded": ({}, THREE | LOST | LISTEN | {"sync_delay": 1, "sync_dtype": "bf16"}),
        "in 8 bits": ({}, THREE | LOST | {"sync_delay": 3, "sync_dtype": "int8", "sync_block": 16}),
        "whole shards lost": ({}, THREE | bernoulli | {"p_sync": 0.5}),
        "replaced": ({}, THREE | {"sync_delay": 1, "delay_correction": "none", "transport": "pieces"}),
        "kept": ({}, THREE | {"sync_delay": 5, "island_keep": 9}),
        "datagrams": ({}, THREE | LOST | {"sync_delay": 2, "transport": "udp"}),
        "datagrams, listen": ({}, THREE | LOST | LISTEN | {"transport": "udp", "sync_dtype": "int8"}),
        "diloco, lost": ({"optimizer": "nadam"}, OUTER | {"p_sync": 0.3}),
    }
    check_all(data, tmp_path, 3, cases)


@pytest.mark.nightly
def test_islands_of_two_ranks_are_virtual_ones(data, tmp_path):
    overlapped = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 20000}
    loss = THREE | LOST | INSIDE | {"sync_delay": 1}
    cases = {
        "copy": ({}, THREE | {"sync_delay": 1, "save_consensus": True}),
        "all lost, overlapped": (overlapped, loss | {"grad_recovery": "previous", "eval_weights": "both"}),
        "all lost, listen, bf16": ({"bf16": True}, loss | LISTEN | {"sync_block": 16}),
        "in pieces": (overlapped, THREE | INSIDE | {"transport": "pieces", "sync_delay": 4}),
        "datagrams": ({"bf16": True}, loss | {"transport": "udp"}),
        "diloco": (overlapped, OUTER | INSIDE),
    }
    check_all(data, tmp_path, 6, cases)
    means = [weights_of(tmp_path / kind / "copy" / "consensus") for kind in ("virtual", "real")]
    assert means[0] == means[1]


@pytest.mark.parametrize(
    ("iterations", "events"),
    [
        (1, [(0, 1, "stop")]),
        (4, [(1, 1, "stop")]),
        (4, [(3, 1, "join")]),
        (6, [(1, 0, "stop"), (3, 0, "return"), (4, 1, "stop"), (5, 1, "return")]),
    ],
    ids=["one iteration", "one that never returns", "a join at the last iteration", "one alone, in turns"],
)
def test_ends_of_a_schedule(data, tmp_path, iterations, events):
    settings = {"train_iters": iterations, "global_batch_size": 4, "lr_warmup_iters": 0}
    loss = THREE | {"islands": 2, "sync_delay": int(iterations > 1)}
    check_all(data, tmp_path, 2, {"run": (settings, loss)}, events)


@pytest.mark.slow
def test_logs_are_those_of_virtual_islands_and_are_replayed(data, tmp_path):
    pq = pytest.importorskip("pyarrow.parquet")
    from megatron_lossy.delivery_log.reader import DeliveryLogFolder
    from megatron_lossy.delivery_log.verify import verify

    lost = {"p_grad": 0.3, "p_param": 0.3, "p_sync": 0.3, "loss_unit": "bucket", "sync_delay": 1}
    loss = THREE | lost | {"island_schedule": write(tmp_path / "events", *EVENTS)}
    base, rows = SMALL | data | SIX, {}
    for kind, ranks, more in (("virtual", 1, {"virtual_workers": 6}), ("real", 6, {})):
        log = tmp_path / f"{kind} log"
        run = (base | more | {"save": str(tmp_path / kind)}, loss | {"delivery_log": str(log)})
        run_ranks(train_runs, ranks, run, grouped=False)
        verdict = verify(DeliveryLogFolder(log))
        assert verdict.problems == [] and set(verdict.usable.values()) == {(0, 7)}
        rows[kind] = sorted(
            map(repr, (row for file in log.glob("*.parquet") for row in pq.read_table(file).to_pylist()))
        )
    assert rows["virtual"] == rows["real"] and len(rows["real"]) > 50
    logs = [(tmp_path / f"{kind} log" / EPOCHS).read_text() for kind in rows]
    assert logs[0] == logs[1] and len(logs[0].splitlines()) > 6
    check_same(tmp_path / "virtual", tmp_path / "real")
    trace = {
        "p_grad": 0.0,
        "p_param": 0.0,
        "p_sync": 0.0,
        "loss_model": ("trace",),
        "trace": str(tmp_path / "real log"),
    }
    again = loss | trace | {"island_schedule": str(tmp_path / "real log" / EPOCHS)}
    run_ranks(train_runs, 6, (base | {"save": str(tmp_path / "again")}, again), grouped=False)
    check_weights(tmp_path / "virtual", tmp_path / "again")


def told_to_stop(rank: int, run: tuple[dict, dict]) -> None:
    """The island that is away gets a SIGTERM in its fifth iteration."""
    from megatron_lossy.lab.train.loop import _Run

    sit_out = _Run._sit_out

    def told(self, batches):
        if rank == 1 and self.progress.iteration == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return sit_out(self, batches)

    _Run._sit_out = told
    train_runs(rank, run)


def test_a_signal_to_one_that_is_away_ends_all_after_the_same_iteration(data, tmp_path):
    loss = THREE | {"islands": 2, "sync_delay": 1, "island_schedule": write(tmp_path / "events", (2, 1, "stop"))}
    run = (SMALL | data | {"train_iters": 200, "eval_iters": 0, "save": str(tmp_path)}, loss)
    run_ranks(told_to_stop, 2, run, grouped=False)
    assert [latest_iteration(tmp_path / f"island_{number}") for number in range(2)] == [5, 5]


def die(rank: int, run: tuple[dict, dict]) -> None:
    """The last rank, of an island that is away, is gone in its fourth iteration, without a word."""
    from megatron_lossy.lab.train.loop import _Run

    sit_out = _Run._sit_out

    def mortal(self, batches):
        if rank == 2 and self.progress.iteration == 3:
            os._exit(1)
        return sit_out(self, batches)

    _Run._sit_out = mortal
    train_runs(rank, run)


def test_others_notice_that_an_island_is_really_gone(data, tmp_path):
    loss = THREE | {"sync_delay": 5, "island_schedule": write(tmp_path / "events", (2, 2, "stop"))}
    with pytest.raises(RankFailed) as failed:
        run_ranks(die, 3, (SMALL | data | SIX | {"train_iters": 100, "eval_iters": 0}, loss), grouped=False)
    text = str(failed.value)
    assert "rank 2:\nthe process died" in text and "no result after" not in text
    assert len(re.findall(r"^rank [01]:$", text, re.MULTILINE)) == 2 and "gloo" in text


def train_and_look(rank: int, run: tuple[dict, dict]) -> dict[int, list[bytes]]:
    """By iteration, the weights of this rank's model before it, of each bucket, and then what an optimizer keeps of them."""
    from megatron_lossy.mechanisms.islands.scheduled import ScheduledIslands

    found: dict[int, list[bytes]] = {}
    come_and_go = ScheduledIslands.come_and_go

    def look(self):
        trains = come_and_go(self)
        kept = [value.bytes().numpy().tobytes() for value in self._state().values() if not isinstance(value, float)]
        found[self._run.iteration] = [bucket.param_data.numpy().tobytes() for bucket, _ in self._buckets] + kept
        return trains

    ScheduledIslands.come_and_go = look
    train_runs(rank, run)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["tensor", "pipeline"])
def test_each_rank_of_parallel_islands_copies_its_peer(data, tmp_path, parallel):
    loss = THREE | {
        "islands": 2,
        "sync_delay": 1,
        "island_schedule": write(tmp_path / "events", (2, 0, "stop"), (6, 0, "return")),
    }
    run = (SMALL | data | {f"{parallel}_model_parallel_size": 2, "save": str(tmp_path)}, loss)
    found = run_ranks(train_and_look, 4, run, grouped=False)
    for mine, other in ((0, 2), (1, 3)):
        assert found[mine][2] == found[mine][5] and found[mine][5] != found[other][5]
        assert found[mine][6] == found[other][6] and found[mine][7] != found[other][7]
        assert len(found[mine][6]) > 10
    assert found[0][6] != found[1][6]


CONTINUED = {
    "copy, lost": ({}, THREE | LOST | {"sync_delay": 3, "delay_correction": "smith"}),
    "listen": ({"bf16": True}, THREE | LISTEN | {"sync_delay": 1, "delay_correction": "ema"}),
    "diloco": ({}, OUTER),
}


@pytest.mark.slow
def test_stopped_and_continued_bit_for_bit(data, tmp_path):
    """While islands are away, cut off, and listen, and with exchanges under way."""
    schedule = {"island_schedule": write(tmp_path / "events", *EVENTS)}
    runs = []
    for name, (settings, loss) in CONTINUED.items():
        base, loss, folder = (
            SMALL | data | SIX | settings | {"hidden_dropout": 0.1},
            loss | schedule,
            str(tmp_path / name),
        )
        runs.append((base | {"save": f"{folder} whole"}, loss))
        for stop in (2, 4, 6):
            runs.append((base | {"save": folder, "load": folder, "exit_interval": stop}, loss))
        runs.append((base | {"save": folder, "load": folder}, loss))
    run_ranks(train_runs, 3, *runs, grouped=False)
    for name in CONTINUED:
        for island in ("island_0", "island_1", "island_2"):
            assert weights_of(tmp_path / f"{name} whole" / island) == weights_of(tmp_path / name / island), (
                name,
                island,
            )


def refused(rank: int, run: tuple[dict, dict], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        train_runs(rank, run)


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        ({"save_replicas": False}, "^--load iteration 4: who is there is in a checkpoint with --save-replicas only"),
        ({}, "has other events before iteration 4 than the checkpoint's run"),
    ],
    ids=["without who is there", "of other events"],
)
def test_a_checkpoint_that_cannot_be_continued_is_refused(data, tmp_path, loss, why):
    folder, path = str(tmp_path / "run"), write(tmp_path / "events", (2, 1, "stop"))
    base = SMALL | data | {"eval_iters": 0, "load": folder}
    own = THREE | {"islands": 2, "sync_delay": 1, "island_schedule": path}
    first = (base | {"save": folder, "exit_interval": 4}, own)
    run_ranks(train_runs, 2, first, grouped=False)
    if not loss:
        write(tmp_path / "events", (3, 1, "stop"))
    run_ranks(refused, 2, (base, own | loss), why, grouped=False)


@pytest.mark.parametrize(
    ("settings", "loss", "line"),
    [
        (
            {"save": "runs"},
            {"save_replicas": False},
            "--save: keeps who is there, and who listens, with --save-rep",
        ),
        ({}, {"rendezvous": "host", "island": 0}, "--island-schedule events: is for islands of one launch"),
        (
            {"pipeline_model_parallel_size": 2},
            {"async_pipeline": True},
            "--island-schedule events: cannot go with --async-pipeline of real ranks",
        ),
    ],
)
def test_flags_that_do_not_fit(settings, loss, line, monkeypatch, tmp_path):
    from megatron_lossy.lab.train.loop import train

    monkeypatch.setenv("WORLD_SIZE", "6")
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "events", (2, 1, "stop"))
    config = TrainConfig(**SMALL | SIX | {"data_path": ("data",), "eval_iters": 0} | settings)
    with pytest.raises(UsageError) as error:
        train(config, LossyConfig(**THREE | {"island_schedule": "events"} | loss))
    assert str(error.value).startswith(line) and not torch.distributed.is_initialized()
