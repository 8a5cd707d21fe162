"""Units are chosen on an accelerator as NumPy chooses them, and what comes of it is the same to the last bit.

The functions for accelerators run on a CPU here. That nobody waits for the device is another test's matter (tests/impostor).
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lossy.base.exchange import Lost
from megatron_lossy.base.fetch import PendingArray, at_hand
from megatron_lossy.base.registry import GRAD_RECOVERIES
from megatron_lossy.channel.draws import generator
from megatron_lossy.mechanisms.priority import choosing, on_device
from megatron_lossy.mechanisms.priority.choosing import Protection, top
from megatron_lossy.recovery import IndexedRows, MaskedRows, base
from megatron_lossy.recovery.feedback import ErrorFeedback
from tests.rules import gradients, required, send, spared
from tests.test_recovery_feedback import delivery_of, units_of

pytestmark = pytest.mark.shows("priorities chosen on an accelerator are those of NumPy")

#: Equal ones, and some that are not finite.
SIZES = st.sampled_from([0.0, 1.0, 1.0, 2.0, 3.5, 1e-30, np.inf, np.nan])


@pytest.fixture
def there(monkeypatch):
    """A function that makes all choices as on an accelerator, or as on a CPU."""
    return lambda yes: monkeypatch.setattr(choosing, "is_here", lambda values: not yes)


@settings(deadline=None)
@given(st.integers(1, 4), st.data(), st.floats(0, 1))
def test_top(rows, data, fraction):
    count = data.draw(st.integers(1, 9))
    sizes = np.array(data.draw(st.lists(SIZES, min_size=rows * count, max_size=rows * count)), dtype=np.float32)
    sizes = sizes.reshape(rows, count)
    out = data.draw(st.none() | st.integers(0, rows - 1))
    rest = np.array([row != out for row in range(rows)])
    expected = np.zeros(sizes.shape, dtype=bool)
    expected[rest] = top(sizes[rest], fraction) | ~np.isfinite(sizes[rest]) if rest.any() else False
    keys = on_device.keys(torch.from_numpy(sizes), out)
    chosen = keys == -1
    on_device.choose_top_(chosen, keys, int(fraction * rest.sum() * count + 0.5))
    np.testing.assert_array_equal(chosen.numpy(), expected)


@settings(deadline=None, max_examples=300)
@given(st.lists(SIZES | st.floats(0, 2.0**20, width=32), min_size=1, max_size=40), st.floats(0, 1))
def test_quantile(values, share):
    values = np.array(values, dtype=np.float32)
    finite = values[np.isfinite(values)]
    expected = np.quantile(finite, share) if len(finite) else np.inf
    assert on_device.quantile(torch.from_numpy(values), share).item() == np.float32(expected)


def protection_of(kind, share, own):
    return Protection(
        kind, share, own, lambda exchange, source, number: generator(3, exchange, source, number).random(1000)
    )


def told_of(rule):
    return None if rule.told is None else vars(rule.told)


def run(there, yes, name, rows, kind, share, own, size, shard, elements, scale, seed):
    """Four steps: the bits that are sent, records, lost units, and the state at the end.

    The second one does not count, and the last one is made again, with other values.
    """
    there(yes)
    random, units = np.random.default_rng(seed), units_of(shard, elements)
    rule = spared(GRAD_RECOVERIES.load(name)(units, size - 1), protection_of(kind, share, own))
    results = []
    for step in range(4):
        sent = random.random((size, units.count)) > 0.5
        sent[size - 1] |= not own
        delivery = delivery_of(step, size, size - 1, units, sent)
        for _ in range(1 + (step == 3)):
            buffer = torch.from_numpy(random.standard_normal(size * shard).astype(np.float32)).round(decimals=1)
            if step == 2:
                buffer[random.integers(len(buffer))] = torch.inf
            send(rule, buffer, delivery, gradients(step, loss_scale=scale))
        rule.finish_step(step, step != 1)
        results += [buffer.view(torch.int32).tolist(), told_of(rule), rule.final.mask.tolist()]
        assert rule.final.spared is None
    left = torch.zeros(size * shard)
    rule.correct(left, gradients(9))
    return results, left.view(torch.int32).tolist(), sorted(rule.state_dict())


@settings(deadline=None)
@given(
    st.sampled_from(["error-feedback", "zero", "renormalize"]), st.sampled_from([IndexedRows, MaskedRows]),
    st.sampled_from(["packet-mean", "element-quantile", "none"]), st.sampled_from([0.0, 0.2, 1.0]), st.booleans(),
    st.integers(1, 4), st.integers(1, 30), st.integers(1, 12), st.sampled_from([None, 8.0]), st.integers(0, 99),
)  # fmt: skip
def test_what_is_sent_kept_and_told(name, rows, kind, share, own, size, shard, elements, scale, seed):
    """Also whole shards as one unit, and shorter last units."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "rows_for", lambda: rows)
        there = lambda yes: patch.setattr(choosing, "is_here", lambda values: not yes)
        arguments = (name, rows, kind, share, own, size, shard, elements, scale, seed)
        here, elsewhere = (run(there, yes, *arguments) for yes in (False, True))
    assert elsewhere == here


def test_a_restart_forgets_a_choice_under_way(there):
    there(True)
    units = units_of(4, 2)
    rule = spared(ErrorFeedback(units, 0), Protection("packet-mean", 0.25))
    send(rule, torch.ones(8), delivery_of(0, 2, 0, units, np.array([[True, True], [False, False]])))
    rule.restart()
    rule.finish_step(0, True)
    assert rule.final is None and not rule.state_dict()


def test_copies_at_other_ranks_always_arrive(there):
    there(True)
    units, none = units_of(4, 2), np.zeros((2, 2), dtype=bool)
    rule = spared(ErrorFeedback(units, 0), Protection("none"))
    rule.share(np.array([[True, True], [True, False]]))
    send(rule, torch.ones(8), delivery_of(0, 2, 0, units, none))
    assert rule.final.mask.tolist() == [[True, True], [False, True]]  # what it owns itself crosses nowhere


def test_over_a_network_the_choice_is_on_its_way(there):
    units = units_of(4, 2)
    must = {}
    for yes in (False, True):
        there(yes)
        rule = required(ErrorFeedback(units, 0), Protection("packet-mean", 0.5))
        chosen = rule.choose(gradients(0, torch.tensor([1.0, 1, 2, 2, 3, 3, 4, 4])))
        assert isinstance(chosen, PendingArray) == yes
        must[yes] = at_hand(chosen).tolist()
        rule.reported(0, np.array([[False, False], [True, False]]))
        rule.finish_step(0, True)
        must[yes] += [told_of(rule)]
    assert must[True] == must[False] and must[True][1] == [False, True]


def test_lost_units_that_are_spared_stay():
    """Also infinities: a product would not keep them."""
    units = units_of(5, 2)
    spared_ = torch.tensor([[True, False, False], [False, True, True]])
    lost = Lost(np.array([[True, True, False], [True, True, True]]), spared_)
    for rows in (IndexedRows, MaskedRows):
        buffer = torch.tensor([torch.inf, 1, 2, 3, 4, 5, 6, torch.inf, -torch.inf, 9])
        rows.zero_(buffer, units, lost)
        assert buffer.tolist() == [torch.inf, 1, 0, 0, 4, 0, 0, torch.inf, -torch.inf, 9]
