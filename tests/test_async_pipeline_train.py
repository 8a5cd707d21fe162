"""Virtual stages in the training program: continued runs, and islands of them."""

from __future__ import annotations

import pytest

from tests.ranks import run_ranks
from tests.test_islands_train import flat, islands_of, losses_of, train_all, weights_of, whole_and_parts
from tests.trainer import TINY, recorded_losses, train_runs

pytestmark = pytest.mark.shows("virtual stages: continued bit for bit, on islands, looking ahead")

SMALL = TINY | {"num_layers": 4, "log_interval": 1, "micro_batch_size": 1, "eval_iters": 1, "virtual_workers": 2}
STAGES = {"async_pipeline": True, "virtual_stages": 4}
ISLANDS = {"islands": 2, "sync_method": "parameters", "sync_fraction": 0.25, "sync_delay": 3}
LOSS = {"p_grad": 0.3, "p_param": 0.3, "loss_unit": "packet", "packet_bytes": 256}


@pytest.mark.slow
def test_one_stage_is_a_synchronous_pipeline(data, tmp_path):
    """Bit for bit: with loss, and on islands. So are all stages in the first iteration, but for what is clipped."""
    one_stage = {**STAGES, "virtual_stages": 1}
    cases = {
        "lossy": (SMALL, {**LOSS, "eval_weights": "both"}),
        "lossy, one stage": (SMALL, {**LOSS, **one_stage, "eval_weights": "both"}),
        "islands": (SMALL, ISLANDS),
        "islands, one stage": (SMALL, {**ISLANDS, **one_stage}),
        "stages": (SMALL | {"clip_grad": 0.0}, STAGES),
        "no stages": (SMALL | {"clip_grad": 0.0}, {}),
    }
    folders = train_all(data, tmp_path, cases)
    for name in ("lossy", "islands"):
        assert recorded_losses(folders[name]) == recorded_losses(folders[f"{name}, one stage"])
        assert weights_of(folders[name]) == weights_of(folders[f"{name}, one stage"])
    late, at_once = (losses_of(folders[name]) for name in ("stages", "no stages"))
    # The learning rate of the first update is 0. The third batch finds the second only in the last stage.
    assert late[:2] == at_once[:2] and late[2] != at_once[2]


CONTINUED = {
    "one worker": ({"virtual_workers": 1, "optimizer": "nadam"}, {"p_act": 0.2, "virtual_boundaries": (2,)}),
    "lossy, bf16": ({"bf16": True}, {**LOSS, "grad_recovery": "previous"}),
    "islands": ({}, {**ISLANDS, "delay_correction": "ema"}),
    "lossy islands": ({"virtual_workers": 4, "bf16": True}, {**ISLANDS, **LOSS, "p_sync": 0.2}),
    "speeds": ({}, {**ISLANDS, "island_speeds": (2.0, 1.0), "sync_delay": 1}),
}


@pytest.mark.slow
def test_stopped_and_continued_bit_for_bit(data, tmp_path):
    """With dropout, while stages have weights of four ages."""
    runs = []
    for name, (settings, loss) in CONTINUED.items():
        loss = {**loss, **STAGES, "save_replicas": True, "eval_weights": "both"}
        runs += whole_and_parts(tmp_path / name, SMALL | data | settings, loss, 3, 5)
    run_ranks(train_runs, 1, *runs, timeout=300)
    for name in CONTINUED:
        whole, parts = tmp_path / name / "whole", tmp_path / name / "parts"
        assert recorded_losses(whole) == recorded_losses(parts), name
        assert weights_of(whole) == weights_of(parts), name
        if "islands" in name:
            assert flat(islands_of(whole)) == flat(islands_of(parts)), name


@pytest.mark.nightly
def test_looking_ahead_wins_back_what_staleness_costs(tmp_path):
    """Validation losses of 4 stages after 300 iterations, paired over three seeds, which are fixed."""
    size = {"num_layers": 4, "hidden_size": 48, "ffn_hidden_size": 192, "num_attention_heads": 4, "seq_length": 32}
    length = {"train_iters": 300, "lr": 3e-3, "min_lr": 3e-4, "lr_warmup_iters": 30, "eval_interval": 300}
    length |= {"eval_iters": 40}
    data = {"data": "stdlib", "log_interval": 300, "weight_decay": 0.1, "micro_batch_size": 8, "global_batch_size": 8}
    base = size | length | data | {"virtual_workers": 1}
    ahead = {"optimizer": "nadam", "adam_beta1": 0.99}
    settings = [({}, {}), ({}, STAGES), (ahead, STAGES)]
    runs = [(base | {"seed": seed} | own, loss) for seed in (1, 2, 3) for own, loss in settings]
    [(summaries, _)] = run_ranks(train_runs, 1, *runs, timeout=1200)
    losses = [summary["valid"]["replica"] for summary in summaries]
    cost = [late - synchronous for synchronous, late in zip(losses[::3], losses[1::3], strict=True)]
    won = [late - ahead for late, ahead in zip(losses[1::3], losses[2::3], strict=True)]
    assert min(cost) > 0.2 and min(won) > 0.1
    assert sum(won) > 0.4 * sum(cost)
