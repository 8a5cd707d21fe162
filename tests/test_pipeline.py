"""Losses of packets between pipeline stages, and the zeros in their place: against plain loops and autograd."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.config import LossyConfig
from megatron_lossy.mechanisms.boundaries import zero_fill
from megatron_lossy.mechanisms.boundaries.messages import Boundary, BoundaryLoss, Messages, order
from megatron_lossy.mechanisms.boundaries.zero_fill import elements_of, lossy, zero_filled
from megatron_lossy.recovery import IndexedRows, MaskedRows
from tests.boundaries import boundary_lost
from tests.reference import boundary_residual, boundary_units

pytestmark = pytest.mark.shows("which messages between stages are lost, and the zeros in their place")

EARLY, LATE = Boundary(stage=1, layer=2, layers=8), Boundary(stage=3, layer=6, layers=8)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 60), st.integers(1, 20), st.data())
def test_what_the_parity_does_not_bring_back_and_the_bound(packets, block, data):
    parity = data.draw(st.integers(1, block))
    bound = data.draw(st.sampled_from([0.0, 0.01, 0.1, 0.29, 0.5, 0.99]))
    config = LossyConfig(p_act=0.1, act_fec=("1,1,0", f"{block},{parity},{bound}", "0.5"))
    loss = BoundaryLoss(config, "act")
    units = boundary_units(packets, block, parity)
    assert loss.units(LATE, packets) == units
    lost = np.array(data.draw(st.lists(st.booleans(), min_size=units, max_size=units)), dtype=bool)
    fate = loss.fate(LATE, packets, lost)
    residual = boundary_residual(packets, block, parity, lost)
    assert (fate.raw, fate.residual) == (lost[:packets].sum(), residual.sum())
    assert fate.again == (100 * residual.sum() > round(100 * bound) * packets)
    np.testing.assert_array_equal(fate.lost, np.zeros(packets) if fate.again else residual)


def test_depth_decides_code_and_bound():
    config = LossyConfig(p_act=0.1, act_fec=("10,5,0.1", "10,1,0.2", "0.5"))
    loss = BoundaryLoss(config, "act")
    for layer in range(1, 8):
        boundary = Boundary(stage=1, layer=layer, layers=8)
        high = layer <= 4
        assert loss.units(boundary, 100) == (150 if high else 110)
        assert loss.bound(boundary, 100) == (10 if high else 20)
    for share, last in ((0.0, 0), (0.29, 29), (1.0, 100)):
        loss = BoundaryLoss(LossyConfig(p_act=0.1, act_fec=("100,34,0.01", "100,10,0.02", str(share))), "act")
        bounds = [loss.bound(Boundary(1, layer, 100), 100) for layer in (max(last, 1), last + 1)]
        assert bounds == [1 if last else 2, 2]


def test_without_retransmission_all_that_is_lost_is_lost():
    loss = BoundaryLoss(LossyConfig(p_act=0.1, act_fec=("off",)), "act")
    lost = np.arange(50) % 2 == 0
    assert loss.units(EARLY, 50) == 50
    fate = loss.fate(EARLY, 50, lost)
    np.testing.assert_array_equal(fate.lost, lost)
    assert (fate.raw, fate.residual, fate.again) == (25, 25, False)


@pytest.mark.parametrize("phase", ["act", "act-grad"])
def test_messages_are_numbered_on_and_lose_what_the_generator_says(phase):
    config = LossyConfig(p_act=0.2, p_act_grad=0.2, act_fec=("100,34,0.5", "100,10,0.5", "0.5"), loss_seed=7)
    messages = Messages(config)
    for step in (0, 5):
        for again in range(2):  # a rerun of the schedule draws alike, whatever number of messages was foretold
            messages.begin(step, 4 if again else 1)
            for number in range(4):
                for boundary in (EARLY, LATE):
                    for rank, tensor in ((0, 0), (3, 0), (3, 1)):
                        lost = messages.next(phase, boundary, rank, tensor, step, 130).fate.lost
                        expected = boundary_lost(config, phase, boundary, rank, tensor, step, number, 130)
                        np.testing.assert_array_equal(lost, expected)


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 6), st.integers(1, 3))
def test_messages_arrive_in_the_order_in_which_they_are_sent(stages, chunks, groups, per_group):
    """Messages of the neighbour, which come from its own passes, but for the ends of the model."""
    table = [
        (group * per_group + k, chunk) for group in range(groups) for chunk in range(chunks) for k in range(per_group)
    ]
    backward = [(number, chunks - 1 - chunk) for number, chunk in table]
    for stage in range(stages):
        first, last = stage == 0, stage == stages - 1
        sent = [(m, c + 1) for m, c in table if c < chunks - 1] if first else table
        assert order("act", table, first, last) == sent
        sent = [(m, c - 1) for m, c in backward if c > 0] if last else backward
        assert order("act-grad", table, first, last) == sent


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_zeros_in_the_place_of_lost_packets(numel, elements, seed):
    random = np.random.default_rng(seed)
    values = random.standard_normal(numel).astype(np.float32)
    values[random.random(numel) < 0.1] = np.inf
    values[random.random(numel) < 0.1] = np.nan
    lost = random.random(-(-numel // elements)) < 0.5
    expected = np.where(np.repeat(lost, elements)[:numel], 0, values)
    tensor = torch.from_numpy(values).requires_grad_()
    np.testing.assert_array_equal(zero_filled(tensor, lost, elements).numpy(), expected)


def test_a_device_that_compiles_graphs_always_masks(monkeypatch):
    """Its graph must not say whether anything was lost; elsewhere the work is left out."""
    none, some = np.zeros(12, dtype=bool), np.arange(12) == 3
    graphs = {}
    for rows in (IndexedRows, MaskedRows):
        monkeypatch.setattr(zero_fill, "rows_for", lambda device, rows=rows: rows)
        for lost, lost_gradients in itertools.product((none, some), repeat=2):
            tensor = torch.randn(6, 15, requires_grad=True)
            arrived = lossy(tensor, lost, lost_gradients, 8)
            filled = 0 if arrived is tensor else len(arrived.grad_fn.fill)
            graphs.setdefault(rows, []).append((arrived is tensor, filled))
            arrived.sum().backward()
            expected = ~np.repeat(lost | lost_gradients, 8)[:90].reshape(6, 15)
            np.testing.assert_array_equal(tensor.grad.numpy(), expected)
    assert graphs[MaskedRows] == [(False, 2)] * 4
    assert graphs[IndexedRows] == [(True, 0), (False, 1), (False, 1), (False, 2)]


def test_the_masked_gradient_is_that_of_where():
    """And what is lost of the gradients on their way back is zero besides."""
    random = np.random.default_rng(3)
    lost, lost_gradients = random.random((2, 12)) < 0.4
    weight = torch.randn(6, 15, generator=torch.Generator().manual_seed(1))
    inputs = [torch.ones(6, 15, requires_grad=True) for _ in range(2)]
    mine = lossy(inputs[0] * 2, lost, lost_gradients, 8)
    where = torch.from_numpy(np.repeat(lost, 8)[:90].reshape(6, 15))
    theirs = torch.where(where, 0.0, inputs[1] * 2)
    assert torch.equal(mine, theirs)
    (mine.square() * weight + mine * weight).sum().backward()
    (theirs.square() * weight + theirs * weight).sum().backward()
    expected = inputs[1].grad
    back = torch.from_numpy(np.repeat(lost_gradients, 8)[:90].reshape(6, 15))
    assert torch.equal(inputs[0].grad, torch.where(back, 0.0, expected))


def test_a_packet_holds_an_element():
    assert elements_of(4096, torch.bfloat16) == 2048
    with pytest.raises(UsageError, match=r"--packet-bytes 3: must hold at least one element of 4 bytes"):
        elements_of(3, torch.float32)


def test_a_run_that_loses_only_activations_is_lossy():
    assert not LossyConfig(p_act=0.1).lossless and not LossyConfig(p_act_grad=0.1).lossless
    assert LossyConfig(p_act=0.1).untouched("grad") and not LossyConfig(p_grad=0.1).loses_at_boundaries
    assert LossyConfig(p_act=0.1, virtual_boundaries=(2,)).describe() == (
        "activations 10 %, their gradients 0 % after layers 2, parity 100 34 up to 0.01 and 100 10 up to 0.02; "
        "seed 1234; simulated"
    )
    both = LossyConfig(p_grad=0.1, p_act_grad=0.05, act_fec=("off",)).describe()
    assert "gradients 10 %, parameters 0 %" in both
    assert "; activations 0 %, their gradients 5 %, without parity; simulated" in both
    assert "activations" not in LossyConfig(p_grad=0.1).describe()
