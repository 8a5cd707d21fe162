"""``--virtual-workers`` of the training program, against real ranks, interrupted, and refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from megatron_lossy.base.checkpoints import latest_iteration
from tests.ranks import RankFailed, run_ranks
from tests.test_train import refused
from tests.trainer import TINY, checkpoint_bytes, in_iteration, read_records, recorded_losses, train_runs, weights_of

pytestmark = pytest.mark.shows("virtual workers in the trainer: as ranks, killed, resumed, 1 to 64")

PACKETS = {"loss_unit": "packet", "packet_bytes": 256}
BURSTS = {"loss_model": ("gilbert-elliott:3",)}
CODED = {"loss_unit": "packet", "packet_bytes": 264, "grad_wire": "int4", "param_wire": "int8"}
LOSS = {"p_grad": 0.3, "p_param": 0.3}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True, "ddp_bucket_size": 9000}


def run_both(workers: int, data: dict, folder: Path, cases: dict[str, tuple[dict, dict]]):
    """For each case the folders of a run of real ranks and of one of virtual workers."""
    base = TINY | data | {"log_interval": 1, "train_iters": 6}
    folders = {name: (folder / f"{name} real", folder / f"{name} virtual") for name in cases}
    real, virtual = (
        [(base | settings | {"save": str(folders[name][k])}, loss) for name, (settings, loss) in cases.items()]
        for k in (0, 1)
    )
    run_ranks(train_runs, workers, *real)
    run_ranks(train_runs, 1, *((config | {"virtual_workers": workers}, loss) for config, loss in virtual))
    return folders


def losses_of(folder: Path) -> list[tuple]:
    """Return all recorded losses and gradient norms. (Loss rates are of one rank, or of all virtual workers.)"""
    return [tuple(pair for pair in record if "loss rate" not in pair[0]) for record in recorded_losses(folder)]


@pytest.mark.slow
def test_two_workers_train_as_two_ranks_bit_for_bit(data, tmp_path):
    """Losses, gradient norms, both validation losses and the checkpoint, with dropout; more cases are in test_virtual.py."""
    dropout = {"attention_dropout": 0.1}
    cases = {
        "no loss": (dropout, {}),
        "packets": (dropout, {**LOSS, **PACKETS, "eval_weights": "both"}),
        "previous": (OVERLAP | {"bf16": True}, {**LOSS, **BURSTS, **PACKETS, "grad_recovery": "previous"}),
    }
    for name, (real, virtual) in run_both(2, data, tmp_path, cases).items():
        assert losses_of(virtual) == losses_of(real), name
        assert weights_of(virtual) == weights_of(real), name
        assert any("exp_avg" in key for key in weights_of(real))
    replica, owner = (record["lm loss"] for record in read_records(tmp_path / "packets virtual", "valid")[-2:])
    assert replica != owner


def die_in_second_save(rank: int, config: dict, loss: dict) -> None:
    """A run that is killed when its second checkpoint is written but not yet in place."""
    from megatron_lossy.lab.train import checkpoint

    original, calls = checkpoint.publish, []

    def die(aside: Path, path: Path) -> None:
        calls.append(aside)
        if len(calls) > 1:
            os._exit(9)
        original(aside, path)

    checkpoint.publish = die
    train_runs(rank, (config, loss))


def signalled(rank: int, config: dict, loss: dict) -> list:
    """Return a run that gets SIGTERM while it computes iteration 6, its fourth."""
    in_iteration(4, lambda made: os.kill(os.getpid(), signal.SIGTERM) if made == 4 else None)
    return train_runs(rank, (config, loss))


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        (OVERLAP, {**LOSS, **BURSTS, **PACKETS, "grad_recovery": "previous"}),
        pytest.param({"bf16": True, "attention_dropout": 0.1}, LOSS, marks=pytest.mark.slow),
        ({"bf16": True}, {**LOSS, **CODED, "grad_recovery": "previous"}),
    ],
    ids=["previous in bursts", "bf16 shards", "codes"],
)
def test_killed_and_stopped_run_continues_bit_for_bit(data, tmp_path, settings, loss):
    """Killed in the save of iteration 4, stopped in iteration 6: with ``--save-replicas`` nothing shows it."""
    base = TINY | data | settings | {"virtual_workers": 4, "save_interval": 2}
    loss = loss | {"save_replicas": True, "eval_weights": "both"}
    once, twice = tmp_path / "once", tmp_path / "twice"
    again = base | {"save": str(twice), "load": str(twice)}
    with pytest.raises(RankFailed):
        run_ranks(die_in_second_save, 1, again, loss)
    assert latest_iteration(twice) == 2
    [([stopped], _)] = run_ranks(signalled, 1, again, loss)
    assert stopped["iteration"] == 6 and not stopped["finished"]
    [([resumed, whole], _)] = run_ranks(train_runs, 1, (again, loss), (base | {"save": str(once)}, loss))
    assert resumed["finished"] and resumed["valid"] == whole["valid"]
    assert whole["valid"]["replica"] != whole["valid"]["owner"]  # something is lost
    assert recorded_losses(once) == recorded_losses(twice)
    assert checkpoint_bytes(once, 8) == checkpoint_bytes(twice, 8)
    assert (once / "iter_0000008/lossy_replicas/virtual.pt").stat().st_size > 10_000


@pytest.mark.slow
def test_resumed_without_replicas_as_ranks_are(data, tmp_path):
    """Replicas start equal and the rules forget, as on real ranks; the checkpoint fits other numbers of workers."""
    loss = {**LOSS, **PACKETS, "grad_recovery": "previous"}
    folders = {}
    for name, ranks, workers in (("real", 2, None), ("virtual", 1, 2)):
        folders[name] = tmp_path / name
        run = TINY | data | {"save": str(folders[name]), "load": str(folders[name]), "virtual_workers": workers}
        run_ranks(train_runs, ranks, (run | {"exit_interval": 3}, loss), (run, loss))
    assert losses_of(folders["virtual"]) == losses_of(folders["real"])
    assert weights_of(folders["virtual"]) == weights_of(folders["real"])

    base = TINY | data | {"load": str(folders["virtual"]), "train_iters": 10, "eval_iters": 0}
    for ranks, workers in ((1, 4), (1, 2), (2, None)):
        for [summary], _output in run_ranks(train_runs, ranks, (base | {"virtual_workers": workers}, loss)):
            assert summary["finished"] and summary["lm loss"] < 5
    assert not (folders["virtual"] / "iter_0000008/lossy_replicas").exists()


def test_replicas_of_other_runs_are_refused(data, tmp_path):
    run = tmp_path / "run"
    loss = LOSS | {"save_replicas": True}
    base = TINY | data | {"train_iters": 2, "eval_iters": 0, "lr_warmup_iters": 0}
    run_ranks(train_runs, 1, (base | {"virtual_workers": 4, "save": str(run)}, loss))
    base |= {"load": str(run), "train_iters": 4}
    folder = run / "iter_0000002"

    hint = "without the flag all replicas begin equal"
    [text] = run_ranks(refused, 1, base | {"virtual_workers": 2}, loss)
    assert text == f"--save-replicas with {folder}: workers was 4 there and is 2 here; {hint}"
    [text] = run_ranks(refused, 1, base | {"virtual_workers": 4}, loss | {"grad_recovery": "previous"})
    assert text == f"--save-replicas with {folder}: --grad-recovery was renormalize there and is previous here; {hint}"
    for text in run_ranks(refused, 2, base, loss):
        assert text.startswith(f"--save-replicas {folder}/lossy_replicas/rank_0000") and "is missing" in text
    (folder / "lossy_replicas" / "virtual.pt").unlink()
    [text] = run_ranks(refused, 1, base | {"virtual_workers": 4}, loss)
    assert text.startswith(f"--save-replicas with {folder}: that checkpoint has no replicas of virtual workers")


@pytest.mark.slow
def test_one_worker_and_sixty_four(data, tmp_path):
    """Without loss N workers are plain accumulation; with it they train, at any N."""
    settings = TINY | data | {"global_batch_size": 64, "micro_batch_size": 1, "train_iters": 3, "hidden_dropout": 0.0}
    settings |= {"eval_iters": 1, "log_interval": 1}

    def run(name, workers, **loss):
        return settings | {"virtual_workers": workers, "metrics_dir": str(tmp_path / name)}, loss

    run_ranks(
        train_runs,
        1,
        run("plain", None),
        run("1", 1),
        run("64", 64),
        run("64 lossy", 64, p_grad=0.1, p_param=0.1, eval_weights="both"),
        run("64 packets", 64, **LOSS, **PACKETS, **BURSTS, grad_recovery="previous"),
    )

    def losses(name):
        return [r["lm loss"] for r in read_records(tmp_path / name, "train") + read_records(tmp_path / name, "valid")]

    assert losses("1") == losses("plain")
    assert losses("64") == pytest.approx(losses("plain"), rel=1e-5)
    for name in ("64 lossy", "64 packets"):
        assert losses(name)[0] == losses("64")[0] and losses(name)[1:3] != losses("64")[1:3]
    for record in read_records(tmp_path / "64 lossy", "train"):
        assert record["loss rate grad"] == pytest.approx(0.1, abs=0.02)
        assert record["loss rate param"] == pytest.approx(0.1, abs=0.02)
