"""Full replicas in the training program: checkpoints and continuation."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.trainer import TINY, checkpoint_bytes, read_records, recorded_losses, train_runs

pytestmark = pytest.mark.shows("full replicas in the trainer: continued, other numbers of ranks")

NOISE = {"grad_error": "gaussian:1rms"}
FULL = {"use_distributed_optimizer": False, "log_interval": 1, "hidden_dropout": 0.0}
OVERLAP = {"overlap_grad_reduce": True, "ddp_bucket_size": 9000}


CASES = {
    "fp32, overlapped": (OVERLAP, {**NOISE, "param_sync_interval": 3, "param_sync_overlap": True}),
    "bf16, overlapped, of all": (
        {"bf16": True},
        {**NOISE, "param_sync_interval": 3, "param_sync_overlap": True, "param_sync_state": "all"},
    ),
    "snr": ({}, {**NOISE, "param_sync_interval": 2, "param_sync_rule": "snr"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "loss"), CASES.values(), ids=CASES)
def test_stopped_runs_continue_bit_for_bit(data, tmp_path, settings, loss):
    """With a synchronisation under way in the save; on ranks and in one process, which do the same."""
    base = TINY | data | FULL | settings
    loss = loss | {"save_replicas": True, "eval_weights": "both", "drift_interval": 1}
    curves = {}
    for kind, ranks, workers in (("real", 2, None), ("virtual", 1, 2)):
        once, twice = tmp_path / f"{kind} once", tmp_path / f"{kind} twice"
        run = base | {"virtual_workers": workers}
        again = run | {"save": str(twice), "load": str(twice)}
        parts = run_ranks(
            train_runs, ranks, (again | {"exit_interval": 3}, loss), (again, loss), (run | {"save": str(once)}, loss)
        )
        [[stopped, resumed, whole], _] = parts[0]
        assert stopped["iteration"] == 3 and resumed["finished"]
        assert resumed["valid"] == whole["valid"] and whole["valid"]["replica"] != whole["valid"]["owner"]
        assert recorded_losses(once) == recorded_losses(twice)
        assert checkpoint_bytes(once, 8) == checkpoint_bytes(twice, 8)
        curves[kind] = [[(r["lm loss"], r.get("grad norm"), r.get("replica divergence")) for r in read_records(once, k)]
                        for k in ("train", "valid")]  # fmt: skip
        curves[kind].append(checkpoint_bytes(once, 8) | {"rng_state": b""})
    assert curves["real"][:2] == curves["virtual"][:2]
    weights = [{k: v for k, v in curves[kind][2].items() if "rng" not in k} for kind in curves]
    assert weights[0] == weights[1]


def test_a_checkpoint_holds_the_mean_and_fits_other_numbers_of_ranks(data, tmp_path):
    base = TINY | data | FULL | {"save": str(tmp_path / "run"), "train_iters": 4}
    loss = {**NOISE, "eval_weights": "both"}
    run_ranks(train_runs, 1, (base | {"virtual_workers": 3, "global_batch_size": 6}, loss))
    last = read_records(tmp_path / "run", "valid")
    saved = {record["weights"]: record["lm loss"] for record in last[-2:]}
    # Without training, and with another number of workers, all have the saved weights.
    resumed = base | {"load": str(tmp_path / "run"), "train_iters": 5, "lr_decay_iters": 5, "eval_iters": 1}
    resumed |= {"lr": 1e-30, "min_lr": 0.0, "global_batch_size": 12}
    for ranks, workers in ((1, 3), (2, None)):
        folder = tmp_path / f"again {ranks}"
        run_ranks(train_runs, ranks, (resumed | {"save": str(folder), "virtual_workers": workers}, loss))
        after = {record["weights"]: record["lm loss"] for record in read_records(folder, "valid")[-2:]}
        assert after["replica"] == pytest.approx(after["owner"], rel=1e-6)
    assert saved["replica"] != saved["owner"]
