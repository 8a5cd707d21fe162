"""Priorities and error feedback: what is chosen, what is kept, and what comes of it in the end (docs/smart.md)."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.errors import UsageError
from megatron_lossy.base.exchange import Delivery, Exchange, Lost, Stream, cut
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.channel.draws import generator
from megatron_lossy.config import LossyConfig
from megatron_lossy.config.facts import Facts
from megatron_lossy.config.refusal import check_refusals
from megatron_lossy.mechanisms.priority.choosing import Priority, Protection, unit_means
from megatron_lossy.recovery import IndexedRows, MaskedRows
from megatron_lossy.recovery.feedback import ErrorFeedback
from tests.reference import ReferenceReduce, pieces
from tests.rules import gradients, required, send, spared

pytestmark = pytest.mark.shows("priorities and error feedback by value; all is applied but the residual")

STEP = Exchange("grad", Stream(), 0)


def units_of(shard, elements):
    [units], _ = cut([shard], [4], "packet", 4 * elements)
    return units


def everything(size, units):
    return Lost(np.ones((size, units.count), dtype=bool))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 9), st.sampled_from([torch.float32, torch.bfloat16]))
def test_importance_against_numpy(size, shard, elements, dtype):
    values = torch.from_numpy(np.random.default_rng(shard).standard_normal(3 + size * shard)).to(dtype)
    buffer = values[3:]
    rows = buffer.float().numpy().reshape(size, shard)
    expected = [[np.abs(row[piece]).mean() for piece in pieces(shard, elements)] for row in rows]
    np.testing.assert_allclose(unit_means(buffer, units_of(shard, elements)).numpy(), expected, rtol=1e-5)


def lost_for_good(priority, buffer, lost):
    priority.spare(buffer, lost, STEP)
    return priority.settle()


def test_what_is_spared():
    """Rank 1 of 3: its own units never cross. A value that is not finite is always spared, on top of the share."""
    units = units_of(4, 2)
    buffer = torch.tensor([1.0, 1, 9, 9, 50, 50, 50, 50, 2, 2, float("nan"), 0])
    lost = Lost(np.array([[True, True], [False, False], [True, True]]))
    for kind, share, expected in [
        ("packet-mean", 0.25, [[1, 0], [0, 0], [1, 0]]),
        ("packet-mean", 0.0, [[1, 1], [0, 0], [1, 0]]),
        ("none", 0.5, [[1, 1], [0, 0], [1, 0]]),
    ]:
        priority = Priority(Protection(kind, share), units, 1)
        final = lost_for_good(priority, buffer, lost)
        np.testing.assert_array_equal(final.mask, np.array(expected, dtype=bool), f"{kind} {share}")
        told = priority.told
        assert (told.units, told.lost, told.recovered) == (4, 4, 4 - final.mask.sum())


def test_own_units_count_where_they_can_be_lost():
    units = units_of(2, 1)
    buffer = torch.tensor([1.0, 2, 8, 4])
    final = lost_for_good(Priority(Protection("packet-mean", 0.25, own=True), units, 1), buffer, everything(2, units))
    np.testing.assert_array_equal(final.mask, [[True, True], [False, True]])


def test_the_literal_rule():
    """A packet counts if the mean of its values is above a quantile of single values."""
    units = units_of(1000, 10)
    buffer = torch.full((2000,), 0.01)
    buffer[1000:1010] = 1.0  # one unit of a hundred to destination 1, which holds 1 % of the values
    buffer[1050:1055] = 1.0  # half a unit
    drawn = generator(1, STEP, 0, 0).random(1000)
    protection = Protection("element-quantile", 0.01, draw=lambda *key: drawn)
    high = ~lost_for_good(Priority(protection, units, 0), buffer, everything(2, units)).mask
    assert np.flatnonzero(high[1]).tolist() == [0]
    all_equal = lost_for_good(Priority(protection, units, 0), torch.ones(2000), everything(2, units))
    assert not all_equal.mask[1].any()


def test_the_sample_depends_on_the_exchange_alone():
    one, other = (generator(1, dataclasses.replace(STEP, step=step), 2, 3).random(5) for step in (0, 1))
    np.testing.assert_array_equal(one, generator(1, STEP, 2, 3).random(5))
    assert not np.array_equal(one, other)
    assert not np.array_equal(one, generator(1, STEP, 3, 3).random(5))
    assert not np.array_equal(one, generator(2, STEP, 2, 3).random(5))


@settings(deadline=None)
@given(
    st.integers(1, 4), st.integers(1, 30), st.integers(1, 12), st.sampled_from([IndexedRows, MaskedRows]),
    st.sampled_from([torch.float32, torch.bfloat16]), st.booleans(), st.integers(0, 99),
)  # fmt: skip
def test_adding_rows(size, shard, elements, rows, dtype, wide, seed):
    """The addend may be wider than the buffer; the sum is rounded once."""
    random, units = np.random.default_rng(seed), units_of(shard, elements)
    lost = random.random((size, units.count)) < 0.5
    values = torch.from_numpy(random.standard_normal((2, size * shard))).to(dtype)
    added = torch.from_numpy(random.standard_normal(size * shard)).to(torch.float32 if wide else dtype)
    mask = torch.from_numpy(np.repeat(lost, elements, axis=1)[:, :shard].ravel().copy()) if elements <= shard else None
    if mask is None:
        mask = torch.from_numpy(np.repeat(lost, shard, axis=1).ravel().copy())
    buffer = values[0].clone()
    rows.add_(buffer, units, Lost(lost), rows.take(added, units, Lost(lost)))
    expected = torch.where(mask, (values[0].float() + added.float()).to(dtype), values[0])
    assert torch.equal(buffer, expected)


def delivery_of(step, size, rank, units, sent):
    arrived = np.ones((1, size, units.count), dtype=bool)
    return Delivery(Exchange("grad", Stream(), step), range(size), [rank], arrived, [units], sent)


def exchange(rule, grads, step, sent, **options):
    """Return the part of ``grads`` [N, shard] that is put on the wire."""
    buffer = grads.clone().view(-1)
    send(rule, buffer, delivery_of(step, len(grads), rule.rank, rule.units, sent), gradients(step, **options))
    return buffer.view(grads.shape)


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 20), st.integers(1, 6), st.integers(0, 99))
def test_all_that_was_sent_is_applied_but_for_the_residual(size, shard, elements, seed):
    """To the last bit, over integers; steps that do not count change nothing."""
    random, units = np.random.default_rng(seed), units_of(shard, elements)
    rule = spared(ErrorFeedback(units, 0))
    given_, applied = torch.zeros(size, shard), torch.zeros(size, shard)
    for step in range(12):
        grads = torch.from_numpy(random.integers(-1000, 1000, (size, shard)).astype(np.float32))
        sent = random.random((size, units.count)) > 0.6
        sent[0] = True
        arrived = exchange(rule, grads, step, sent)
        successful = random.random() > 0.3
        if random.random() > 0.7:  # Megatron's rerun machine makes a step again
            assert torch.equal(arrived, exchange(rule, grads, step, sent))
        rule.finish_step(step, successful)
        if successful:
            given_ += grads
            applied += arrived
    residual = exchange(rule, torch.zeros(size, shard), 99, np.ones((size, units.count), dtype=bool))
    assert torch.equal(applied + residual, given_)


@pytest.mark.parametrize(("priority", "dtype"), [(0.0, torch.float32), (0.1, torch.float32), (0.0, torch.bfloat16)])
def test_against_the_reference(priority, dtype):
    size, shard, elements = 3, 100, 7
    random, units = np.random.default_rng(0), units_of(shard, elements)
    reference = ReferenceReduce("error-feedback", size, shard, elements, priority)
    protection = Protection("packet-mean", priority)
    rules = [spared(ErrorFeedback(units, rank), protection) for rank in range(size)]
    for step in range(8):
        grads = torch.from_numpy(random.standard_normal((size, size, shard))).to(dtype)
        arrived = random.random((size, size, units.count)) > 0.5
        arrived[range(size), range(size)] = True
        total = sum(exchange(rule, grads[rule.rank], step, arrived[rule.rank]).float() for rule in rules)
        counted = step != 4
        expected = reference(grads.float().numpy(), arrived, counted)
        for rule in rules:
            rule.finish_step(step, counted)
        if dtype == torch.bfloat16:  # the reference does not round what is sent
            np.testing.assert_allclose(total.numpy() / size, expected, atol=0.02)
        else:
            np.testing.assert_array_equal(total.numpy() / np.float32(size), expected)


def test_with_a_loss_scale_the_residual_has_none():
    units = units_of(4, 2)
    lost, everyone = np.array([[True, True], [False, True]]), np.ones((2, 2), dtype=bool)
    rule = spared(ErrorFeedback(units, 0))
    grads = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]])
    exchange(rule, 8 * grads, 0, lost, loss_scale=torch.tensor(8.0))
    rule.finish_step(0, True)
    arrived = exchange(rule, 2 * grads, 1, everyone, loss_scale=torch.tensor(2.0))
    assert torch.equal(arrived, 2 * torch.tensor([[1.0, 2, 3, 4], [10, 12, 7, 8]]))


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_value_that_is_not_finite_stops_one_step_only(bad):
    """It is delivered, so that the step is rejected, and is not kept."""
    units = units_of(2, 1)
    lost = np.array([[True, True], [False, False]])
    rule = spared(ErrorFeedback(units, 0))
    arrived = exchange(rule, torch.tensor([[1.0, 1], [bad, 2]]), 0, lost)
    assert not torch.isfinite(arrived).all() and arrived[1, 1] == 0
    rule.finish_step(0, False)
    for step in (1, 2):
        assert torch.isfinite(exchange(rule, torch.ones(2, 2), step, lost)).all()
        rule.finish_step(step, True)


def sends_unseen(rule, grads, step, scale=None):
    """Return the part of ``grads`` [N, shard] that is sent before the network's losses are known."""
    buffer = grads.clone().view(-1)
    rule.choose(gradients(step, buffer, loss_scale=scale))
    return buffer.view(grads.shape)


@settings(deadline=None)
@given(st.integers(0, 99))
def test_a_late_report_delays_and_drops_nothing(seed):
    """Over integers, to the last bit, though reports come at once, later or after steps that do not count."""
    size, shard, elements = 3, 12, 5
    random, units = np.random.default_rng(seed), units_of(shard, elements)
    rule = required(ErrorFeedback(units, 0))
    given_, applied = torch.zeros(size, shard), torch.zeros(size, shard)
    unsaid = {}
    for step in range(12):
        for late in [late for late in unsaid if random.random() > 0.5]:
            rule.reported(late, unsaid.pop(late))
        assert rule.late == list(unsaid)
        grads = torch.from_numpy(random.integers(-1000, 1000, (size, shard)).astype(np.float32))
        payload = sends_unseen(rule, grads, step)
        lost = random.random((size, units.count)) > 0.6
        lost[0] = False
        assert rule.sent_in(step)
        on_time, successful = random.random() > 0.5, random.random() > 0.3
        rule.reported(step, lost if on_time else None)
        if not on_time:
            unsaid[step] = lost
        rule.finish_step(step, successful)
        if successful:
            given_ += grads
            there = torch.from_numpy(~np.repeat(lost, elements, axis=1)[:, :shard])
            applied += torch.where(there, payload, 0.0)
    for late in list(unsaid):
        rule.reported(late, unsaid.pop(late))
    assert rule.late == []
    assert torch.equal(applied + sends_unseen(rule, torch.zeros(size, shard), 99), given_)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_late_report_knows_the_loss_scale_of_what_was_sent(dtype, late):
    """The scale is another one in each step; what is kept has none."""
    rule, lost = required(ErrorFeedback(units_of(4, 2), 0)), np.array([[False, False], [True, False]])
    grads = torch.tensor([[1.0, 2, 3, 4], [5, 6, 7, 8]], dtype=dtype)
    assert torch.equal(sends_unseen(rule, 8 * grads, 0, torch.tensor(8.0)), 8 * grads)
    rule.reported(0, None if late else lost)
    rule.finish_step(0, True)
    if late:
        assert torch.equal(sends_unseen(rule, 4 * grads, 1, torch.tensor(4.0)), 4 * grads)
        rule.reported(1, np.zeros_like(lost))
        rule.finish_step(1, True)
        rule.reported(0, lost)
    expected = 2 * torch.tensor([[1.0, 2, 3, 4], [10, 12, 7, 8]], dtype=dtype)
    assert torch.equal(sends_unseen(rule, 2 * grads, 2, torch.tensor(2.0)), expected)


def test_a_rule_without_a_residual_asks_for_late_reports_too():
    """Until somebody says what arrived, the network keeps what was sent."""
    rule = required(GRAD_RECOVERIES.load("zero")(units_of(4, 2), 0), Protection("packet-mean", 0.5))
    sends_unseen(rule, torch.ones(2, 4), 0)
    rule.reported(0, None)
    assert rule.late == [0]
    rule.finish_step(0, True)
    rule.reported(0, None)
    assert rule.late == [0]
    rule.reported(0, np.zeros((2, 2), dtype=bool))
    assert rule.late == []


def test_owners_that_must_know_priorities_need_virtual_workers():
    config = LossyConfig(p_grad=0.1, loss_unit="packet", grad_priority="packet-mean")
    with pytest.raises(UsageError, match="--grad-priority packet-mean with --grad-recovery renormalize: needs virtual"):
        check_refusals(config, Facts(virtual=False))
    for recovery in ("zero", "error-feedback"):
        check_refusals(dataclasses.replace(config, grad_recovery=recovery), Facts(virtual=False))
