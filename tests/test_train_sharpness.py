"""``--sharpness-interval``: known eigenvalues, a dense Hessian, and a run that does not notice."""

from __future__ import annotations

import contextlib
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.checkpoints import latest_iteration
from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.lab.theory import Lag, stability_limit
from megatron_lossy.lab.train.config import TrainConfig
from megatron_lossy.lab.train.facts import check_flags
from tests.ranks import run_ranks
from tests.trainer import TINY, checkpoint_bytes, read_records, train_runs

pytestmark = pytest.mark.shows("`--sharpness-interval`: against known and dense matrices; training does not notice")

VIRTUAL = TINY | {"virtual_workers": 4, "log_interval": 1}
#: A model so small that its Hessian can be written out.
SMALL = TINY | {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 8, "num_attention_heads": 2, "seq_length": 8}
SMALL |= {"num_query_groups": 1, "make_vocab_size_divisible_by": 1, "virtual_workers": 4, "data": "stdlib"}
VOCABULARY = 12


def quadratic(eigenvalues, seed):
    """A symmetric matrix with these eigenvalues."""
    generator = torch.Generator().manual_seed(seed)
    basis, _ = torch.linalg.qr(
        torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64)
    )
    return basis @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64)) @ basis.T


def largest(matrix, start, products):
    from megatron_lossy.lab.train.sharpness import largest_eigenvalue

    return largest_eigenvalue(lambda vector: matrix @ vector, start, products)


@settings(deadline=None)
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=8), st.integers(0, 99))
def test_as_many_products_as_dimensions_find_the_largest_eigenvalue(eigenvalues, seed):
    """Not the one of the largest absolute value."""
    start = torch.randn(len(eigenvalues), generator=torch.Generator().manual_seed(seed + 1), dtype=torch.float64)
    value, vector = largest(matrix := quadratic(eigenvalues, seed), start, len(eigenvalues))
    assert value <= max(eigenvalues) + 1e-9
    spread = max(eigenvalues) - min(eigenvalues)
    assert value == pytest.approx(max(eigenvalues), abs=1e-3 * spread + 1e-9)
    assert float(vector.norm()) == pytest.approx(1)
    assert float(vector @ matrix @ vector) == pytest.approx(value, abs=1e-6 * spread + 1e-9)


def test_few_products_are_at_least_as_good_as_power_iterations_and_go_on_from_a_vector():
    eigenvalues = [100.0, *np.linspace(-20, 60, 299)]
    matrix = quadratic(eigenvalues, 0)
    vector = start = torch.randn(300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for _ in range(4):
        vector = matrix @ (vector / vector.norm())
    power = float(vector @ matrix @ vector / (vector @ vector))
    value, found = largest(matrix, start, 5)
    assert power <= value <= 100
    again, _ = largest(matrix, found, 4)
    assert value < again <= 100 + 1e-9
    assert largest(matrix, found, 12)[0] == pytest.approx(100, rel=1e-3)


def test_what_is_not_finite_is_no_number():
    value, start = largest(torch.full((3, 3), math.inf, dtype=torch.float64), torch.ones(3, dtype=torch.float64), 3)
    assert math.isnan(value) and bool(torch.isfinite(start).all())


def against_dense(rank, lag):
    """The largest eigenvalue at a trained point, that of the dense matrix in float64, and the values next to it."""
    from megatron_lossy.base import device

    device.prepare()
    from megatron_lossy.hooks.versions import innermost
    from megatron_lossy.lab.train import sharpness
    from megatron_lossy.lab.train.model import build_model, model_parallel, world
    from megatron_lossy.lab.train.optimizer import build_optimizer

    config = TrainConfig(**SMALL, sharpness_interval=1, adam_beta1=0.8)
    generator = torch.Generator().manual_seed(5)
    dataset = [
        {
            "tokens": torch.randint(VOCABULARY, (8,), generator=generator),
            "labels": torch.randint(VOCABULARY, (8,), generator=generator),
            "position_ids": torch.arange(8),
            "loss_mask": (torch.rand(8, generator=generator) < 0.8).float(),
        }
        for _ in range(8)
    ]
    wire = SimpleNamespace(lag=lambda exchange: lag, stream=None)
    run = SimpleNamespace(
        owner_weights=lambda chunks: contextlib.nullcontext(),
        iteration=0,
        groups=[SimpleNamespace(wire=wire)],
        config=LossyConfig(p_param=0.4, loss_unit="packet", param_send="plain"),
    )
    with world(config), model_parallel(config):
        (model,) = build_model(config, VOCABULARY)
        optimizer, scheduler = build_optimizer(config, [model])
        one = sharpness.Sharpness(config, [model], optimizer, run, dataset)
        one.measure(8)
        before = one.metrics()
        for _ in range(3):
            model.zero_grad_buffer()
            scheduler.step(increment=config.global_batch_size)
            for parameter in model.parameters():
                parameter.main_grad.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
            optimizer.step()
        buffers = [buffer.grad_data.clone() for buffer in model.buffers]
        weights = [parameter.detach().clone() for parameter in model.parameters()]
        state = torch.get_rng_state()
        for _ in range(3):
            one.measure(8)
        assert all(torch.equal(a, buffer.grad_data) for a, buffer in zip(buffers, model.buffers))
        assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters()))
        assert torch.equal(state, torch.get_rng_state()) and model.training
        found = one._found[-1]
        mean = one.metrics()["sharpness"]

        scale = one._preconditioner().double()
        twin = innermost(build_model(config, VOCABULARY)[0])
        twin.load_state_dict(innermost(model).state_dict())
        twin.double().eval()
        parameters = list(twin.parameters())
        tokens, labels, mask = (torch.stack([s[k] for s in dataset]) for k in ("tokens", "labels", "loss_mask"))

        def gradient():
            logits = twin(tokens, torch.arange(8).expand(8, 8), None)
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
            parts = torch.autograd.grad((losses * mask.double()).sum() / mask.sum(), parameters)
            return torch.cat([part.flatten() for part in parts])

        columns = []
        for parameter in parameters:
            flat = parameter.data.view(-1)
            for place in range(flat.numel()):
                sides = []
                for sign in (1, -2):
                    flat[place] += sign * 1e-5
                    sides.append(gradient())
                flat[place] += 1e-5
                columns.append((sides[0] - sides[1]) / 2e-5)
        matrix = scale[:, None] * torch.stack(columns) * scale
        rate = optimizer.param_groups[0]["lr"]
        return found, mean, float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[-1]), rate, before, len(columns)


@pytest.mark.slow
def test_a_model_against_its_dense_hessian():
    lag = Lag.of(0.4)
    ((found, mean, dense, rate, before, size),) = run_ranks(against_dense, 1, (lag.share, lag.mean))
    assert before == {}, "nothing to measure before the first update"
    assert 500 < size < 1500
    assert found["sharpness"] == pytest.approx(dense, rel=1e-2)
    assert found["sharpness"] < dense * 1.001 and mean < found["sharpness"] * 1.001
    assert found["lr x sharpness"] == pytest.approx(rate * found["sharpness"])
    assert found["lag x lr x sharpness"] == pytest.approx(lag.mean * rate * found["sharpness"])
    assert found["largest lr x sharpness"] == pytest.approx(stability_limit(0.8, lag))


PACKETS = {"loss_unit": "packet", "packet_bytes": 256}
LEAD = PACKETS | {"p_grad": 0.4, "p_param": 0.4, "param_send": "compensated"}
CODES = {"packet_bytes": 264, "grad_wire": "int8", "param_wire": "int8"}


@pytest.mark.parametrize(
    ("train", "loss"),
    [
        ({}, {}),
        ({}, LEAD | {"eval_weights": "both"}),
        ({"optimizer": "nadam", "calculate_per_token_loss": True}, LEAD | CODES | {"drift_interval": 2}),
        ({"optimizer": "sgd", "share_embeddings_and_output_weights": True}, PACKETS | {"p_param": 0.3}),
    ],
    ids=["no loss", "lead", "codes", "sgd"],
)
def test_a_run_does_not_notice(data, tmp_path, train, loss):
    """Losses, norms, evaluations and the checkpoint, with its random states, with dropout, are the same to the last bit."""
    runs = {}
    for name, interval in (("with", 3), ("without", 0)):
        runs[name] = VIRTUAL | data | train | {"save": str(tmp_path / name), "sharpness_interval": interval}
    run_ranks(train_runs, 1, *((run, loss | {"save_replicas": True}) for run in runs.values()))
    records = {name: read_records(tmp_path / name, "train") + read_records(tmp_path / name, "valid") for name in runs}
    measured = [record["iteration"] for record in records["with"] if "sharpness" in record]
    assert measured == [3, 6]
    for with_, without in zip(records["with"], records["without"], strict=True):
        assert {k: with_[k] for k in without if k != "seconds"} == {k: v for k, v in without.items() if k != "seconds"}
    here, there = (checkpoint_bytes(tmp_path / name, latest_iteration(tmp_path / name)) for name in runs)
    assert here == there
    states = [(next((tmp_path / name).rglob("virtual.pt"), None)) for name in runs]
    if loss:
        assert states[0].read_bytes() == states[1].read_bytes()


def test_what_it_does_not_go_with():
    config = TrainConfig(**SMALL, sharpness_interval=5)
    for loss, why in (
        ({"islands": 2, "sync_method": "parameters"}, "--islands"),
        ({"async_pipeline": True}, "--async-pipeline"),
    ):
        with pytest.raises(UsageError, match=f"^--sharpness-interval 5: .*{why}"):
            check_flags(config, LossyConfig(**loss), 1)
